"""Where ranks are to run, and the command that starts them there."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from keras_ring.errors import LaunchError
from keras_ring.launch import command, hosts
from keras_ring.launch.cli import main
from keras_ring.launch.hosts import Host
from keras_ring.launch.job import Failure

MPIRUN = Path("/mpi/bin/mpirun")
OPEN_MPI_5 = command.Launcher(MPIRUN, command.OPEN_MPI, (5, 0, 11))
OPEN_MPI_4 = command.Launcher(MPIRUN, command.OPEN_MPI, (4, 1, 2))
MPICH = command.Launcher(MPIRUN, command.MPICH, (4, 2, 1))
INTEL_MPI = command.Launcher(MPIRUN, command.INTEL_MPI, (2021, 8))
TWO = (Host("h1", 2), Host("h2", 2))


def test_hosts_are_read_from_a_list():
    assert hosts.parse_hosts("h1:2, h2,10.0.0.3:4,[fe80::1]:2") == (
        Host("h1", 2),
        Host("h2", 1),
        Host("10.0.0.3", 4),
        Host("[fe80::1]", 2),
    )


@pytest.mark.parametrize("text", ["", "h1:", "h1:0", "h1:x", "h1:2,,h2", "h 1", ":2", "h1:-1"])
def test_a_list_that_is_none_is_an_error_that_shows_the_form(text):
    with pytest.raises(LaunchError, match="such as h1:2"):
        hosts.parse_hosts(text)


def test_hosts_are_read_from_a_file_of_either_form(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# head\nh1 slots=2 max_slots=4\n\nh2:3  # MPICH's\nh3\nh3\n")
    assert hosts.read_hostfile(path) == (Host("h1", 2), Host("h2", 3), Host("h3", 2))


@pytest.mark.parametrize(
    "content, message",
    [(None, "cannot be read"), ("# none\n", "names no host"), ("h1\nh2 slots=x\n", "line 2")],
)
def test_a_bad_hostfile_is_an_error_that_names_it(tmp_path, content, message):
    path = tmp_path / "hosts"
    if content is not None:
        path.write_text(content)
    with pytest.raises(LaunchError, match=message) as raised:
        hosts.read_hostfile(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize(
    "text, names",
    [
        ("a", ["a"]),
        ("a,b-1", ["a", "b-1"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("n[098-101].site", ["n098.site", "n099.site", "n100.site", "n101.site"]),
    ],
)
def test_slurms_lists_of_nodes_are_written_out(text, names):
    assert hosts.expand_nodelist(text) == names


@given(st.lists(st.from_regex(r"[a-z]{1,4}[0-9]{0,3}", fullmatch=True), min_size=1))
def test_plain_lists_of_nodes_stay_as_they_are(names):
    assert hosts.expand_nodelist(",".join(names)) == names


@pytest.mark.parametrize("text", ["", "a[1-", "a[x]", "a[1-2", "a]1["])
def test_what_is_no_list_of_nodes_is_an_error(text):
    with pytest.raises(LaunchError, match="SLURM_JOB_NODELIST"):
        hosts.expand_nodelist(text)


def test_allocations_of_batch_systems_are_read(tmp_path):
    assert hosts.allocated_hosts({}) is None
    slurm = {"SLURM_JOB_NODELIST": "n[1-4]", "SLURM_TASKS_PER_NODE": "2(x3),1"}
    given = hosts.allocated_hosts(slurm)
    assert given == tuple(Host(f"n{i}", n) for i, n in enumerate((2, 2, 2, 1), start=1))
    with pytest.raises(LaunchError, match="is for 2 nodes"):
        hosts.allocated_hosts({**slurm, "SLURM_TASKS_PER_NODE": "2,1"})
    with pytest.raises(LaunchError, match="is not a number of tasks"):
        hosts.allocated_hosts({**slurm, "SLURM_TASKS_PER_NODE": "2(x"})
    nodes = tmp_path / "nodes"
    nodes.write_text("n1\nn1\nn2\n")
    assert hosts.allocated_hosts({"PBS_NODEFILE": str(nodes)}) == (Host("n1", 2), Host("n2", 1))
    with pytest.raises(LaunchError, match="PBS_NODEFILE"):
        hosts.allocated_hosts({"PBS_NODEFILE": str(tmp_path / "none")})


@pytest.mark.parametrize(
    "text, expected",
    [
        ("mpirun (Open MPI) 5.0.11\n\nReport bugs", (command.OPEN_MPI, (5, 0, 11))),
        ("mpirun (Open MPI) 4.1.2", (command.OPEN_MPI, (4, 1, 2))),
        ("HYDRA build details:\n    Version:   4.2.1\n", (command.MPICH, (4, 2, 1))),
        (
            "Intel(R) MPI Library for Linux* OS, Version 2021.8 Build 20221129",
            (command.INTEL_MPI, (2021, 8)),
        ),
    ],
)
def test_each_mpi_is_told_by_its_version(text, expected):
    assert command.parse_version(text, MPIRUN) == expected


def test_another_launcher_is_an_error_that_shows_what_it_said():
    with pytest.raises(LaunchError, match="'slurm 23.02'; expected Open MPI, MPICH or Intel MPI"):
        command.parse_version("slurm 23.02", MPIRUN)


@pytest.mark.parametrize(
    "launcher, options",
    [
        (OPEN_MPI_5, "--bind-to none --oversubscribe"),
        (OPEN_MPI_4, "--bind-to none --oversubscribe"),
        (MPICH, "-bind-to none"),
        (INTEL_MPI, "-genv I_MPI_PIN 0"),
    ],
    ids=str,
)
def test_ranks_on_this_host_are_bound_to_no_core(launcher, options):
    expected = f"/mpi/bin/mpirun -np 3 {options} python train.py"
    assert command.compose(launcher, 3, ["python", "train.py"]) == expected.split()


@pytest.mark.parametrize(
    "launcher, options",
    [
        (
            OPEN_MPI_5,
            "--bind-to none -H h1:2,h2:2 --mca btl_tcp_if_include eth1 "
            "--prtemca prte_if_include eth1 -x A",
        ),
        (
            OPEN_MPI_4,
            "--bind-to none -H h1:2,h2:2 --mca btl_tcp_if_include eth1 "
            "--mca oob_tcp_if_include eth1 -x A",
        ),
        (MPICH, "-bind-to none -iface eth1 -hosts h1:2,h2:2"),
        (INTEL_MPI, "-genv I_MPI_PIN 0 -iface eth1 -hosts h1,h2 -ppn 2"),
    ],
    ids=str,
)
def test_ranks_on_several_hosts_use_one_interface(launcher, options):
    composed = command.compose(launcher, 4, ["train"], hosts=TWO, interface="eth1", forwarded=["A"])
    assert composed == f"/mpi/bin/mpirun -np 4 {options} train".split()


def test_only_open_mpi_has_to_be_told_of_root():
    for launcher in (OPEN_MPI_5, OPEN_MPI_4, MPICH, INTEL_MPI):
        composed = command.compose(launcher, 1, ["train"], is_root=True)
        assert ("--allow-run-as-root" in composed) == (launcher.mpi == command.OPEN_MPI)


def test_placements_that_cannot_be_are_errors():
    with pytest.raises(LaunchError, match="-np 5: the hosts h1:2,h2:2 have 4 slots"):
        command.compose(OPEN_MPI_5, 5, ["train"], hosts=TWO)
    with pytest.raises(LaunchError, match="h1:2, h2:1"):
        command.compose(INTEL_MPI, 3, ["train"], hosts=(Host("h1", 2), Host("h2", 1)))


def test_other_hosts_get_what_training_reads_and_what_is_asked_for():
    names = ["TF_CPP_MIN_LOG_LEVEL", "KERAS_RING_TIMELINE", "HOME", "PATH", "MY_A", "SECRET"]
    assert command.forwarded_names(names) == ["KERAS_RING_TIMELINE", "PATH", "TF_CPP_MIN_LOG_LEVEL"]
    assert "MY_A" in command.forwarded_names(names, ["MY_*"])
    assert "SECRET" not in command.forwarded_names(names, ["MY_*"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["run", "python"], "-np is missing"),
        (["run", "-np", "2"], "which program"),
        (["run", "-np", "0", "python"], "expected at least 1 rank"),
        (["run", "-H", "a", "--hostfile", "b", "python"], "Give one of them"),
    ],
)
def test_a_command_that_lacks_something_is_one_sentence(arguments, message, capsys, monkeypatch):
    for name in ("SLURM_JOB_NODELIST", "PBS_NODEFILE"):
        monkeypatch.delenv(name, raising=False)
    assert main(arguments) == 1
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


CAUSE = "Traceback (most recent call last):\n  at 1\nKeyError: 'a'\n"
LATER = "\nDuring handling of the above exception, another exception occurred:\n\n"
ERROR = "Traceback (most recent call last):\n  at 2\nValueError: bad"


@pytest.mark.parametrize(
    "tail, traceback",
    [
        ("", ""),
        ("Epoch 1\n", ""),
        (f"before\n{ERROR}\n", ERROR),
        (f"{CAUSE}said\n{ERROR}", ERROR),
        (f"before\n{CAUSE}{LATER}{ERROR}\n", f"{CAUSE}{LATER}{ERROR}"),
    ],
    ids=["nothing", "no error", "one", "one after another", "one and its cause"],
)
def test_the_traceback_reported_is_the_last_with_its_causes(tail, traceback):
    assert Failure(0, "h", 1, 1, False, tail).traceback == traceback


def test_what_followed_from_another_rank_is_known():
    lost = "Traceback (most recent call last):\n  at\nkeras_ring.errors.PeerLostError: gone"
    assert Failure(0, "h", 1, 1, False, lost).is_consequence
    assert not Failure(0, "h", 1, 1, False, ERROR).is_consequence


def test_statuses_are_those_of_a_shell():
    for code, status in ((3, 3), (-9, 137), (-15, 143)):
        assert Failure(0, "h", 1, code, False, "").status == status
