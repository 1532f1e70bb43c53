"""The fixture `mpirun` itself: what it returns, and that it leaves nothing behind."""

from __future__ import annotations

import signal

import pytest

RANK = 'int(os.environ["OMPI_COMM_WORLD_RANK"])'


def test_mpirun_returns_exit_status_and_both_outputs(mpirun):
    result = mpirun(
        2,
        f"""
        import os, sys
        print("out", {RANK})
        print("err", {RANK}, file=sys.stderr)
        sys.exit(3 if {RANK} == 1 else 0)
        """,
    )
    assert result.returncode == 3
    assert "out 1" in result.stdout
    assert "err 1" in result.stderr
    result.assert_no_orphans()


def test_mpirun_passes_arguments_and_environment(mpirun):
    program = "import os, sys; print(sys.argv[1], os.environ['COLOUR'])"
    result = mpirun(1, ["-c", program, "sky"], env={"COLOUR": "blue"}).assert_ok()
    assert result.stdout == "sky blue\n"


def test_mpirun_past_its_timeout_kills_all_ranks_and_shows_their_stacks(mpirun):
    program = "import time\ndef nap_of_a_rank(): time.sleep(600)\nnap_of_a_rank()"
    with pytest.raises(pytest.fail.Exception, match="did not end within 2 s") as caught:
        mpirun(2, program, timeout=2)
    assert "in nap_of_a_rank" in str(caught.value)
    assert not mpirun._jobs[0]._processes()


def test_mpirun_reports_an_orphan_and_kills_it(mpirun):
    result = mpirun(
        1,
        """
        import subprocess
        null = subprocess.DEVNULL
        subprocess.Popen(["sleep", "601"], stdout=null, stderr=null, start_new_session=True)
        """,
    )
    assert len(result.orphans) == 1
    assert "sleep 601" in result.orphans[0]
    with pytest.raises(AssertionError, match="sleep 601"):
        result.assert_no_orphans()
    assert not mpirun._jobs[0]._processes()


def test_signal_rank_reaches_that_rank_alone(mpirun):
    job = mpirun.start(
        2, f"import os, time\nprint('up', {RANK}, flush=True)\ntime.sleep(600 * {RANK})"
    )
    job.wait_for_output("up 1")
    job.signal_rank(1, signal.SIGKILL)
    assert job.wait(30).returncode != 0
