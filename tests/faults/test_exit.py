"""The end of a job in which nothing went wrong: status 0 and not a word."""

from __future__ import annotations

import pytest

# TensorFlow logs how it was built, whatever its log level.
TENSORFLOW_LOGS = ("WARNING: All log messages before absl", "I0000 ", "To enable the following")


def check_quiet(result) -> None:
    result.assert_ok().assert_no_orphans()
    spoken = [
        line for line in result.output.splitlines() if line and not line.startswith(TENSORFLOW_LOGS)
    ]
    assert spoken == []


def test_job_with_collectives_and_helpers_ends_quietly(mpirun) -> None:
    result = mpirun(
        3,
        """
        import multiprocessing, os, subprocess, sys, threading
        import tensorflow as tf
        import keras_ring as kr
        kr.init()
        kr.allreduce([1.0])
        tf.function(lambda x: kr.allreduce(x))(tf.ones(3))
        child = multiprocessing.get_context("fork").Process(target=sys.exit)
        child.start()
        child.join()
        subprocess.run(["true"], check=True)
        if os.fork() == 0:
            sys.exit(0)  # runs the exit handlers of the parent
        os.wait()
        kr.allreduce([1.0])
        threading.Thread(target=kr.barrier).start()
        """,
        timeout=60,
    )

    check_quiet(result)


@pytest.mark.parametrize("ending", ["", "kr.shutdown()"], ids=["without shutdown", "shutdown"])
def test_job_that_imports_mpi4py_first_ends_quietly(ending: str, mpirun) -> None:
    """Then mpi4py finalises MPI, after us; and one rank is later than the other."""
    result = mpirun(
        2,
        f"""
        import time
        from mpi4py import MPI
        import keras_ring as kr
        kr.init()
        kr.allreduce([1.0])
        time.sleep(0.5 * kr.rank())
        {ending}
        """,
        timeout=60,
    )

    check_quiet(result)


def test_mpi4py_outlives_a_generation(mpirun) -> None:
    result = mpirun(
        2,
        """
        import keras_ring as kr
        kr.init()
        from mpi4py import MPI
        assert MPI.COMM_WORLD.allreduce(1) == kr.size()
        kr.shutdown()
        assert MPI.COMM_WORLD.allreduce(1) == 2
        """,
        timeout=60,
    )

    check_quiet(result)
