"""What the others see when a rank is lost and mpirun lets them live (`--with-ft ulfm`).

A job holds several worlds of two ranks, each with a fault of its own: TensorFlow's start is what
costs time here.
"""

from __future__ import annotations

import re

ULFM = ("--with-ft", "ulfm")
# The last rank of each world fails; the others say what they saw and how long it took.
FAULTS = {
    "raises": ("raise ValueError('bad sample')", "its script raised ValueError: bad sample"),
    "exits": ("sys.exit(3)", r"it called keras_ring\.shutdown\(\), or its script has ended"),
    "exits at once": ("os._exit(4)", r"its process ended without leaving \(killed, or out of mem"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", "its process ended without leaving"),
}
PROGRAM = """
import os, random, signal, sys, threading, time
from mpi4py import MPI
import numpy as np
import tensorflow as tf
import keras_ring as kr

world = MPI.COMM_WORLD.rank // 2
kr.init(MPI.COMM_WORLD.Split(world))
pids = kr.allgather_object(os.getpid())

def survive(call):
    try:
        while True:
            try:
                call()
            except tf.errors.OpError as error:  # of a graph
                raise kr.errors.from_tf(error) from None
    except kr.PeerLostError as error:
        print(f"SAW world {world} {seconds_since_fault():.2f} s: {error}", flush=True)
    start = time.monotonic()
    try:  # a later call fails at once, for the same reason
        kr.allreduce([1.0], name="later")
    except kr.PeerLostError as error:
        print(f"LATER world {world} {time.monotonic() - start:.2f} s: {error}", flush=True)
    kr.shutdown()
    print(f"LEFT world {world}", flush=True)
    # As soon as one ends with an error mpirun ends the other worlds too.
    open(f"FOLDER/left{world}", "w").close()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not all(
        os.path.exists(f"FOLDER/left{each}") for each in range(MPI.COMM_WORLD.size // 2)
    ):
        time.sleep(0.02)
    os._exit(1)

note = f"FOLDER/fault{world}"

def fault():
    with open(note, "w") as file:
        file.write(str(time.time()))

def seconds_since_fault():
    with open(note) as file:
        return time.time() - float(file.read())
"""


def check_survivors(output: str, reasons: list[str]) -> None:
    for world, reason in enumerate(reasons):
        seen = re.search(rf"SAW world {world} ([\d.]+) s: (.*)", output)
        assert seen, output
        assert float(seen[1]) < 2.0, output
        assert re.search(rf"'[^']+': rank 1 \(host .*, pid \d+\) is gone: {reason}", seen[2]), (
            output
        )
        later = re.search(rf"LATER world {world} ([\d.]+) s: allreduce 'later': rank 1 \(", output)
        assert later, output
        assert float(later[1]) < 0.5, output
        assert f"LEFT world {world}" in output


def test_survivors_are_told_who_is_gone_and_why(mpirun, tmp_path) -> None:
    statements = [statement for statement, _ in FAULTS.values()]
    result = mpirun(
        2 * len(FAULTS),
        PROGRAM.replace("FOLDER", str(tmp_path))
        + f"""
@tf.function
def in_graph(x):
    return kr.allreduce(x, name="weights")

for step in range(5):
    in_graph(tf.ones(1))
if kr.rank() == 1:
    time.sleep(0.5)  # rank 0 waits in the collective
    fault()
    exec({statements!r}[world])
survive(lambda: in_graph(tf.ones(1)) if world % 2 else kr.allreduce([1.0], name="weights"))
""",
        mpirun_args=ULFM,
        timeout=120,
    )

    assert result.returncode != 0
    result.assert_no_orphans()
    check_survivors(result.output, [reason for _, reason in FAULTS.values()])


def test_rank_killed_at_any_moment_never_leaves_the_other_waiting(mpirun, tmp_path) -> None:
    """Small and large, fused and single, eager and graph: killed somewhere in between."""
    result = mpirun(
        8,
        PROGRAM.replace("FOLDER", str(tmp_path))
        + """
large = np.ones(3_000_000, "float32")

@tf.function
def many(x):
    return [kr.allreduce(x + i, name=f"many/{i}") for i in range(20)]

def everything():
    many(tf.ones(1000))
    kr.allreduce(large, name="large")
    kr.allgather(large[: 1000 * kr.rank()], name="gathered")
    kr.broadcast(large, 1, name="given")
    kr.barrier(name="met")

everything()
kr.barrier()
if kr.rank() == 1:
    def kill():
        fault()
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(random.uniform(0.0, 0.3), kill).start()
survive(everything)
""",
        mpirun_args=ULFM,
        timeout=120,
    )

    assert result.returncode != 0
    result.assert_no_orphans()
    check_survivors(result.output, ["its process ended without leaving"] * 4)
