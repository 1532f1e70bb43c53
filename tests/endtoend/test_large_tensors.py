"""Tensors beyond 2^31 elements, which are beyond 2 GiB too: a count in 32 bits would be wrong."""

from __future__ import annotations

import os

import pytest

PROGRAM = """
import tensorflow as tf
import keras_ring as kr
kr.init()
n, rank = kr.size(), kr.rank()
elems = 2**31 + 5

# In a graph the result takes the input's memory, and what depends on an argument is not computed
# while the graph is made: 2 GiB a rank instead of 6.
@tf.function
def reduce(value):
    total = kr.allreduce(tf.fill([elems], value), "sum")
    return tf.reduce_min(total), tf.reduce_max(total), tf.size(total, tf.int64)

@tf.function
def broadcast(value):
    got = kr.broadcast(tf.fill([elems], value), n - 1)
    return tf.reduce_min(got), tf.reduce_max(got), tf.size(got, tf.int64)

@tf.function
def gather(value):
    rows = 2**30 + rank
    got = kr.allgather(tf.fill([rows], value))
    return got[0], got[2**30 - 1], got[2**30], got[-1], tf.size(got, tf.int64)

own = tf.constant(rank + 1, tf.int8)
assert [int(v) for v in reduce(own)] == [n * (n + 1) // 2, n * (n + 1) // 2, elems]
assert [int(v) for v in broadcast(own)] == [n, n, elems]
assert [int(v) for v in gather(own)] == [1, 1, 2, 2, 2**31 + 1]
print("all right", flush=True)
"""
GIB = 2**30


def free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(300)
@pytest.mark.skipif(free_bytes() < 10 * GIB, reason="takes 8 GiB of memory")
@pytest.mark.parametrize("algorithm", ["auto", "ring"])
def test_tensors_beyond_two_to_the_31_elements(algorithm: str, mpirun) -> None:
    result = mpirun(2, PROGRAM, env={"KERAS_RING_ALGORITHM": algorithm}, timeout=280)

    result.assert_ok().assert_no_orphans()
    assert result.stdout.count("all right") == 2
