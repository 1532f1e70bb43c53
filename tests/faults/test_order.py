"""Ranks that build their function in another order, with few and with many threads."""

from __future__ import annotations

PROGRAM = """
import random, sys
import numpy as np
import tensorflow as tf
import keras
from mpi4py import MPI

# Two worlds of two ranks in one job: one with a single inter-op thread, one with eight.
world = MPI.COMM_WORLD.rank // 2
tf.config.threading.set_inter_op_parallelism_threads([1, 8][world])
tf.config.threading.set_intra_op_parallelism_threads(1)

import keras_ring as kr
kr.init(MPI.COMM_WORLD.Split(world))
rank = kr.rank()

if rank == 1:  # shifts all of TensorFlow's and Keras's counters
    extra = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    extra.compile("adam", "mse")
    extra.fit(np.ones((4, 2)), np.ones((4, 1)), verbose=0)

order = list(range(20))
random.Random(rank).shuffle(order)

def call(i, x):
    value = x[: 1 + i * 97] * (i + 1.0)
    if i % 4 == 3:
        return kr.allgather(value, name=f"independent/{i}")
    if i % 4 == 2:
        return kr.broadcast(value, i % 2, name=f"independent/{i}")
    return kr.allreduce(value, "sum", name=f"independent/{i}")

@tf.function
def independent(x):
    results = {i: call(i, x) for i in order}
    return [results[i] for i in range(20)]

@tf.function
def dependent(x):  # chains of collectives with compute between them, four beside each other
    chains = [x + i for i in range(4)]
    for step in range(5):
        for i in sorted(range(4), key=lambda i: order[i]):
            chains[i] = kr.allreduce(tf.tanh(chains[i]), "mean", name=f"chain/{i}/{step}")
    return chains

ramp = tf.range(2000, dtype=tf.float32) + 10000.0 * rank
parts = [np.arange(2000, dtype="float32") + 10000.0 * r for r in range(2)]
for _ in range(50):
    for i, result in enumerate(independent(ramp)):
        own = [part[: 1 + i * 97] * np.float32(i + 1.0) for part in parts]
        expected = [own[0] + own[1], own[0] + own[1], own[i % 2], np.concatenate(own)]
        np.testing.assert_array_equal(result, expected[i % 4])
digests = set()
for _ in range(50):
    digests.add(b"".join(chain.numpy().tobytes() for chain in dependent(ramp / 20000.0)))
assert len(digests) == 1  # the same bits in every run
assert len(set(kr.allgather_object(digests.pop()))) == 1  # and on every rank
print("done", world, rank, flush=True)
"""


def test_functions_built_in_another_order_on_each_rank_agree(mpirun) -> None:
    result = mpirun(4, PROGRAM, timeout=120).assert_ok()

    assert sorted(line for line in result.stdout.splitlines() if line.startswith("done")) == [
        "done 0 0",
        "done 0 1",
        "done 1 0",
        "done 1 1",
    ]
