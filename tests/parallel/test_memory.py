"""Resident memory does not grow with the number of steps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tensorflow as tf

import keras_ring as kr

STEPS = 5_000
# 1 KiB a step would be 5 MiB.
ALLOWED_BYTES = 3 * 1024 * 1024


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.timeout(300)
def test_resident_memory_is_flat_over_5000_steps() -> None:
    if kr.size() > 2:
        pytest.skip("takes minutes with more ranks than cores")
    sizes = [3, 1000, 40_000, 300_000, 7]

    @tf.function
    def step(value: tf.Tensor) -> tf.Tensor:
        total = kr.grouped_allreduce([tf.fill([size], value) for size in sizes], name="group")
        alone = [kr.allreduce(tf.fill([size], value), name=f"alone{size}") for size in sizes]
        rows = kr.allgather(tf.fill([2, 3], value), name="rows")
        return tf.add_n([t[0] for t in (*total, *alone)]) + rows[0, 0]

    value = tf.constant(1.0)
    for _ in range(STEPS // 5):
        step(value)
    before = resident_bytes()
    for _ in range(STEPS):
        step(value)

    assert resident_bytes() - before < ALLOWED_BYTES
