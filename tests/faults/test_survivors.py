"""What the others see when a rank is lost and mpirun lets them live (`--with-ft ulfm`).

A job holds several worlds of two ranks, each with a fault of its own: TensorFlow's start is what
costs time here.
"""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

ULFM = ("--with-ft", "ulfm")
# One rank of each world fails; the others say what they saw and how long it took.
FAULTS = {
    "raises": ("raise ValueError('bad sample')", "its script raised ValueError: bad sample"),
    "exits": ("sys.exit(3)", r"it called keras_ring\.shutdown\(\), or its script has ended"),
    "exits at once": ("os._exit(4)", r"its process ended without leaving \(killed, or out of mem"),
    "is killed": ("os.kill(os.getpid(), signal.SIGKILL)", "its process ended without leaving"),
}
PROGRAM = """
import glob, os, random, signal, sys, threading, time
from mpi4py import MPI
import numpy as np
import tensorflow as tf
import keras_ring as kr

WORLD_OF = [world for world, size in enumerate(SIZES) for _ in range(size)]
world = WORLD_OF[MPI.COMM_WORLD.rank]
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
        took_s = seconds_since_fault()
        print(f"SAW world {world} rank {kr.rank()} {took_s:.2f} s: {error}", flush=True)
    start = time.monotonic()
    try:  # a later call fails at once, for the same reason
        kr.allreduce([1.0], name="later")
    except kr.PeerLostError as error:
        took_s = time.monotonic() - start
        print(f"LATER world {world} rank {kr.rank()} {took_s:.2f} s: {error}", flush=True)
    kr.shutdown()
    print(f"LEFT world {world}", flush=True)
    # As soon as one ends with an error mpirun ends the other worlds too.
    open(f"FOLDER/left{MPI.COMM_WORLD.rank}", "w").close()
    deadline = time.monotonic() + 30
    survivors = len(WORLD_OF) - len(SIZES)
    while time.monotonic() < deadline and len(glob.glob("FOLDER/left*")) < survivors:
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


def program(folder: Path, sizes: list[int], rest: str) -> str:
    """Worlds of these sizes; `rest` is what each of their ranks does."""
    return f"SIZES = {sizes}\n" + (PROGRAM + rest).replace("FOLDER", str(folder))


def check_survivors(output: str, sizes: list[int], lost: list[int], reasons: list[str]) -> None:
    for world, (size, lost_rank, reason) in enumerate(zip(sizes, lost, reasons, strict=True)):
        gone = rf"rank {lost_rank} \(host .*, pid \d+\) is gone: "
        for rank in sorted(set(range(size)) - {lost_rank}):
            seen = re.search(rf"SAW world {world} rank {rank} ([\d.]+) s: (.*)", output)
            assert seen, output
            assert float(seen[1]) < 2.0, output
            assert re.search(rf"'[^']+': {gone}{reason}", seen[2]), output
            later = re.search(
                rf"LATER world {world} rank {rank} ([\d.]+) s: allreduce 'later': {gone}", output
            )
            assert later, output
            assert float(later[1]) < 0.5, output
        assert output.count(f"LEFT world {world}\n") == size - 1, output


def test_survivors_are_told_who_is_gone_and_why(mpirun, tmp_path) -> None:
    statements = [statement for statement, _ in FAULTS.values()]
    sizes = [2] * len(FAULTS)
    result = mpirun(
        sum(sizes),
        program(
            tmp_path,
            sizes,
            f"""
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
        ),
        mpirun_args=ULFM,
        timeout=120,
    )

    assert result.returncode != 0
    result.assert_no_orphans()
    check_survivors(
        result.output, sizes, [1] * len(sizes), [reason for _, reason in FAULTS.values()]
    )


# Every result is compared as long as there is one: a rank that dies must not spoil a sum.
WORK = """
size = kr.size()
large = np.ones(3_000_000, "float32")

@tf.function
def many(x):
    return [kr.allreduce(x + i, name=f"many/{i}") for i in range(20)]

def everything():
    sums = many(tf.ones(1000) * kr.rank())
    for i, total in enumerate(sums):
        assert np.all(total == i + (size - 1) / 2), "WRONG many"
    assert np.all(kr.allreduce(large, "sum", name="large") == size), "WRONG large"
    gathered = kr.allgather(large[: 1000 * kr.rank()] * kr.rank(), name="gathered")
    ranks = np.repeat(np.arange(size), 1000 * np.arange(size))
    assert np.array_equal(gathered, ranks), "WRONG gathered"
    assert np.all(kr.broadcast(large * kr.rank(), 1, name="given") == 1), "WRONG given"
    parts = kr.reducescatter(np.full(300 * size, kr.rank()), "max", name="parts")
    assert np.all(parts == size - 1), "WRONG parts"
    kr.barrier(name="met")

everything()
with open("/proc/self/maps") as maps:
    for line in maps:
        if "/dev/shm/" in line:
            print("MAPPED", line.split()[5], flush=True)
kr.barrier()
victim, after_s = KILLS[world]
if kr.rank() == victim:
    def kill():
        fault()
        os.kill(os.getpid(), signal.SIGKILL)
    threading.Timer(after_s, kill).start()
survive(everything)
"""
KILLED_IN_A_JOB = 3


def test_rank_killed_at_any_moment_never_leaves_the_others_waiting(
    mpirun, tmp_path, pytestconfig: pytest.Config
) -> None:
    """Small and large, fused and single, eager and graph: killed somewhere in between.

    `pytest tests/faults/test_survivors.py --kills 100` kills so many.
    """
    sizes = [2, 2, 4]
    for job in range(-(-pytestconfig.getoption("--kills") // KILLED_IN_A_JOB)):
        kills = [(random.randrange(size), random.uniform(0.0, 0.4)) for size in sizes]
        folder = tmp_path / str(job)
        folder.mkdir()
        result = mpirun(
            sum(sizes),
            program(folder, sizes, f"KILLS = {kills}\n{WORK}"),
            mpirun_args=ULFM,
            timeout=120,
        )

        assert result.returncode != 0
        result.assert_no_orphans()
        assert "WRONG" not in result.output, result.output
        lost = [victim for victim, _ in kills]
        check_survivors(result.output, sizes, lost, ["its process ended without leaving"] * 3)
        mapped = set(re.findall(r"MAPPED (/dev/shm/\S+)", result.output))
        assert not [path for path in mapped if Path(path).exists()], result.output
