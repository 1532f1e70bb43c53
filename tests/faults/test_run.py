"""`keras-ring run` and `kr.run`: the first failure is reported, all end, and nothing is left."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path

import pytest

from keras_ring.errors import LaunchError
from keras_ring.launch.function import run

CLI = "import sys; from keras_ring.launch.cli import main; sys.exit(main())"

# The last rank fails after a few good steps, while the others wait for it.
PROGRAM = """
import os, signal, sys, time
import keras_ring as kr

kr.init()
for step in range(5):
    kr.allreduce([float(step)], name="weights")
print("rank", kr.rank(), "trains", flush=True)
if kr.rank() == kr.size() - 1:
    {statement}
kr.allreduce([1.0], name="weights")
"""


@pytest.fixture
def keras_ring_run(mpirun, tmp_path):
    """Return a function that runs a program's text by `keras-ring run`."""

    def start(program: str, *options: str, env: dict[str, str] | None = None):
        path = tmp_path / "train.py"
        path.write_text(program)
        return mpirun.start(0, ["-c", CLI, "run", *options, sys.executable, str(path)], env=env)

    return start


@pytest.mark.parametrize(
    "statement, status, report",
    [
        ("raise ValueError('bad sample')", 1, r"exit status 1\nTraceback (.|\n)*bad sample$"),
        ("sys.exit(3)", 3, "exit status 3"),
        ("os._exit(4)", 4, "exit status 4"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, r"killed by signal 9 \(SIGKILL\)"),
    ],
    ids=["raises", "exits", "exits at once", "is killed"],
)
def test_a_rank_that_fails_is_named_and_ends_the_job_with_its_status(
    keras_ring_run, statement, status, report
) -> None:
    job = keras_ring_run(PROGRAM.format(statement=statement), "-np", "3")
    result = job.wait(60)
    result.assert_no_orphans()
    assert result.returncode == status, result.output
    last = result.stderr.rpartition("\nkeras-ring run: ")[2].strip()
    assert re.match(rf"rank 2 \(host \S+, pid \d+\) failed first: {report}", last), result.output


def test_a_rank_that_hangs_and_hears_no_signal_ends_with_the_others(keras_ring_run) -> None:
    statement = "signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
    job = keras_ring_run(
        PROGRAM.format(statement=statement),
        "-np",
        "2",
        env={"KERAS_RING_STALL_S": "1", "KERAS_RING_STALL_ERROR_S": "3"},
    )
    result = job.wait(60)
    result.assert_no_orphans()
    assert result.returncode == 1, result.output
    last = result.stderr.rpartition("\nkeras-ring run: ")[2]
    assert last.startswith("rank 0 "), result.output
    assert "StallError: allreduce 'weights'" in last


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_keras_ring_run_itself_is_ended(keras_ring_run, number) -> None:
    job = keras_ring_run(PROGRAM.format(statement="time.sleep(600)"), "-np", "2")
    job.wait_for_output("rank 1 trains")
    os.kill(job.process.pid, number)
    started = time.monotonic()
    result = job.wait(30)
    while job._processes() and time.monotonic() < started + 10:
        time.sleep(0.05)
    result.assert_no_orphans()
    assert result.returncode != 0


def test_output_is_the_programs_own_with_or_without_its_rank(keras_ring_run) -> None:
    program = """
import sys
sys.stdout.write("no end of line")
print("to stderr", file=sys.stderr)
"""
    plain = keras_ring_run(program, "-np", "2").wait(30).assert_ok()
    assert plain.stdout == "no end of line" * 2
    assert plain.stderr == "to stderr\n" * 2
    prefixed = keras_ring_run(program, "-np", "2", "--prefix-output").wait(30).assert_ok()
    assert sorted(prefixed.stdout.splitlines()) == ["[0] no end of line", "[1] no end of line"]
    assert sorted(prefixed.stderr.splitlines()) == ["[0] to stderr", "[1] to stderr"]


def test_options_that_do_not_fit_are_one_sentence(keras_ring_run) -> None:
    result = keras_ring_run("", "-np", "5", "-H", "localhost:2").wait(30)
    assert result.returncode == 1
    assert result.stderr.startswith("-np 5: the hosts localhost:2 have 2 slots.")


def test_check_says_what_a_report_of_a_bug_needs_and_whether_ranks_work(mpirun) -> None:
    result = mpirun(0, ["-c", CLI, "check", "-np", "3"], timeout=60).assert_ok()
    for pattern in (
        r"tensorflow +\d",
        r"keras +\d",
        r"mpirun +(Open MPI|MPICH|Intel MPI) \d",
        r"compiler +\S",
        r"libraries built for +\S+ \S+ \d",
        r"shared memory +/dev/shm of",
        r"interface lo +127\.0\.0\.1",
        r"ranks +3 on 1 host",
        r"allreduce 64 MiB +[\d.]+ ms, [\d.]+ GB/s",
        r"all ranks computed the right sums",
    ):
        assert re.search(pattern, result.stdout), f"{pattern}\n{result.stdout}"


def test_check_fails_where_ranks_do_not_work(mpirun, tmp_path) -> None:
    # A TensorFlow that cannot be imported stands before the real one.
    (tmp_path / "tensorflow.py").write_text("raise ImportError('broken installation')\n")
    code = CLI.replace("import sys;", f"import sys; sys.path.insert(0, {str(tmp_path)!r});")
    result = mpirun(0, ["-c", code, "check"], timeout=60)
    assert result.returncode == 1
    assert "broken installation" in result.stdout


def test_a_function_returns_each_ranks_result() -> None:
    factor = 10

    def work(summand: int, *, more: int = 0) -> tuple[int, float]:
        import keras_ring as kr

        kr.init()
        total = kr.allreduce([float(kr.rank() + summand)], "sum").numpy()[0]
        return kr.rank() * factor + more, float(total)

    assert run(work, (1,), {"more": 5}, np=2) == [(5, 3.0), (15, 3.0)]


def test_a_function_that_raises_on_one_rank_is_an_error_with_its_traceback() -> None:
    def work() -> None:
        import keras_ring as kr

        kr.init()
        if kr.rank() == 1:
            raise ValueError("bad sample")
        kr.barrier()

    with pytest.raises(LaunchError, match=r"rank 1 \(host(.|\n)*ValueError: bad sample"):
        run(work, np=2)


def test_a_result_that_does_not_pickle_is_an_error_that_says_so() -> None:
    with pytest.raises(LaunchError, match="the result generator does not pickle"):
        run(lambda: (i for i in range(3)), np=1)


def test_a_result_may_be_large() -> None:
    (result,) = run(lambda n: b"x" * n, (50_000_000,), np=1)
    assert len(result) == 50_000_000


def test_a_stranger_is_not_listened_to() -> None:
    import socket

    from keras_ring.launch import channel

    heard: list[object] = []
    listener = channel.Listener("127.0.0.1", heard.append)
    address = listener.variables["KERAS_RING_REPORT_TO"].rpartition(":")
    try:
        with socket.create_connection((address[0], int(address[2])), timeout=5):
            # Silent: the next one is served nevertheless.
            channel.ask(listener.variables, "known")
        wrong = {**listener.variables, "KERAS_RING_REPORT_KEY": "00" * 32}
        with pytest.raises(Exception, match=r"digest|rejected"):
            channel.ask(wrong, "unknown")
    finally:
        listener.close()
    assert heard == ["known"]


def test_ranks_find_the_modules_of_the_caller(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "only_here.py").write_text("VALUE = 7\n")
    monkeypatch.syspath_prepend(tmp_path)

    def work() -> int:
        import only_here

        return int(only_here.VALUE)

    assert run(work, np=1) == [7]
