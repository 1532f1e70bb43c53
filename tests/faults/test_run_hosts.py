"""`keras-ring run` on three hosts, which network namespaces stand for."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
imitation = importlib.import_module("hosts")
sys.path.pop(0)

WHY_NOT = imitation.why_not()
pytestmark = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT or "there are hosts")

CLI = "import sys; from keras_ring.launch.cli import main; sys.exit(main())"
PROGRAM = """
import os, time
import keras_ring as kr

kr.init()
total = kr.allreduce([1.0], "sum", name="ranks").numpy()[0]
setting = os.environ["MY_SETTING"]
print(f"RANK {kr.rank()} on host {kr.node_rank()}: {total:g}, {setting}", flush=True)
if kr.rank() == kr.size() - 1 and "FAULT":
    raise ValueError("bad sample")
time.sleep(60 * bool("FAULT"))
"""


@pytest.fixture
def run_on_hosts(mpirun, tmp_path) -> Iterator:
    """Return a function that runs a program on three hosts by `keras-ring run`."""
    with imitation.hosts(3) as made, imitation.launcher(made, (1, 1, 1)) as (before, after):
        agent = after[after.index("plm_ssh_agent") + 1]

        def run(fault: str, *options: str):
            path = tmp_path / "train.py"
            path.write_text(PROGRAM.replace("FAULT", fault))
            job = mpirun.start(
                0,
                ["-c", CLI, "run", *options, "--network-interface", "eth0", "-x", "MY_*",
                 "--mpirun-args", f"--prtemca plm_ssh_agent {agent}", sys.executable, str(path)],
                env={"MY_SETTING": "as given"},
                before=before,
            )  # fmt: skip
            return job.wait(100)

        yield run, made
        mpirun.kill_all()  # before its hosts go


def test_ranks_start_on_the_hosts_of_a_list(run_on_hosts) -> None:
    run, made = run_on_hosts
    slots = ",".join(f"{a}:{n}" for a, n in zip(made.addresses, (2, 1, 1), strict=True))
    result = run("", "-H", slots).assert_ok()
    ranks = sorted(re.findall(r"RANK (\d) on host (\d): 4, as given", result.stdout))
    assert ranks == [("0", "0"), ("1", "0"), ("2", "1"), ("3", "2")], result.output


def test_a_failure_on_another_host_of_a_file_is_reported(run_on_hosts, tmp_path) -> None:
    run, made = run_on_hosts
    path = tmp_path / "hosts"
    path.write_text("# three\n" + "".join(f"{a} slots=1\n" for a in made.addresses))
    result = run("fails", "--hostfile", str(path))
    result.assert_no_orphans()
    assert result.returncode == 1, result.output
    last = result.stderr.rpartition("\nkeras-ring run: ")[2]
    host = re.escape(made.names[2])
    assert re.match(rf"rank 2 \(host {host}, pid \d+\) failed first: exit status 1\n", last), last
    assert "ValueError: bad sample" in last
