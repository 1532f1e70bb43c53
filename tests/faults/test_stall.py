"""A rank that does not come: reported, then an error, and the job goes on. And one that sleeps."""

from __future__ import annotations

import re

# A collective that a rank never calls; one that it does not call because it is stopped; and one in
# whose transfer it is stopped. Nobody dies, so one job goes through all of them.
STALLS = """
import contextlib, os, signal, sys, threading, time
from mpi4py import MPI
import tensorflow as tf
import keras_ring as kr

def say(*words):
    print(f"rank {kr.rank()}:", *words, flush=True)

@contextlib.contextmanager
def expect_stall(what):
    start = time.monotonic()
    try:
        yield
    except kr.StallError as error:
        say(what, f"StallError after {time.monotonic() - start:.1f} s:", error)
    else:
        say(what, "no error")

kr.init()
pids = kr.allgather_object(os.getpid())
last = kr.size() - 1

if kr.rank() != last:
    with expect_stall("never"):
        kr.allreduce([1.0], name="key#dense/kernel")
MPI.COMM_WORLD.Barrier()
say("after never", kr.allreduce([1.0], "sum").numpy())

if kr.rank() == last:
    os.kill(os.getpid(), signal.SIGSTOP)
else:
    with expect_stall("stopped"):
        kr.broadcast([1.0], name="gift")
    if kr.rank() == 0:
        os.kill(pids[last], signal.SIGCONT)
say("after stopped", kr.allreduce([1.0], "sum").numpy())

# As a tensor, so that nearly all of the time of a call is the transfer's.
block = tf.ones(50_000_000)
kr.allreduce(block, name="block")
if kr.rank() == last:
    threading.Timer(0.1, os.kill, [os.getpid(), signal.SIGSTOP]).start()
elif kr.rank() == 0:
    threading.Timer(6.0, os.kill, [pids[last], signal.SIGCONT]).start()
with expect_stall("in transfer"):
    for _ in range(100):
        kr.allreduce(block, name="block")
kr.shutdown()
kr.init()
say("new generation", kr.allreduce([1.0], "sum").numpy())
"""


def test_stall_is_reported_on_every_rank_and_then_an_error(mpirun) -> None:
    result = mpirun(
        3,
        STALLS,
        env={"KERAS_RING_STALL_S": "1", "KERAS_RING_STALL_ERROR_S": "3"},
        timeout=100,
    ).assert_ok()
    result.assert_no_orphans()
    output = result.output

    report = (
        r"allreduce 'dense/kernel' has waited \S+ s; missing ranks: 2; ranks that called it: 0, "
        r"1\. The missing ranks have not called it; look for branches that depend on the rank, "
        r"or raise "
    )
    for rank in range(3):
        assert re.search(
            rf"\[keras_ring\] rank {rank}: {report}KERAS_RING_STALL_S \(now 1 s\)", output
        ), output
    for rank in range(2):
        assert re.search(
            rf"rank {rank}: never StallError after [34]\.\d s: {report}KERAS_RING_STALL_ERROR_S",
            output,
        ), output
        assert re.search(
            rf"rank {rank}: stopped StallError after [34]\.\d s: broadcast 'gift' has waited \S+ "
            "s; missing ranks: 2; ranks that called it: 0, 1",
            output,
        ), output
    assert len(re.findall(r"after never \[3\.\]", output)) == 3
    assert len(re.findall(r"after stopped \[3\.\]", output)) == 3
    assert len(re.findall(r"in transfer StallError", output)) == 3
    assert len(re.findall(r"new generation \[3\.\]", output)) == 3


def test_init_that_waits_for_a_rank_says_so(mpirun) -> None:
    """In MPI_Init, which has no limit; and after it, where an error ends the wait."""
    result = mpirun(
        2,
        """
        import os, time
        is_late = os.environ["OMPI_COMM_WORLD_RANK"] == "1"
        import keras_ring as kr
        time.sleep(2.0 * is_late)
        kr.init()
        kr.shutdown()
        if not is_late:
            try:
                kr.init()
            except kr.StallError as error:
                print(error, flush=True)
        from mpi4py import MPI
        MPI.COMM_WORLD.barrier()
        os._exit(1)
        """,
        env={"KERAS_RING_STALL_S": "1", "KERAS_RING_STALL_ERROR_S": "2"},
        timeout=60,
    )

    assert re.search(
        r"\[keras_ring\] pid \d+: init has waited 1 s in MPI_Init for the other processes of the "
        r"job\. Some have not called keras_ring\.init\(\)",
        result.stderr,
    )
    assert (
        "init has waited 2 s for the other ranks. Call keras_ring.init() on every rank, or raise "
        "KERAS_RING_STALL_ERROR_S."
    ) in result.stdout
