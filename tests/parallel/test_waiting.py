"""A rank that waits leaves its core to others."""

from __future__ import annotations

import os
import time

import pytest
import tensorflow as tf

import keras_ring as kr

WAIT_S = 10.0
# 2 % of a core; a rank that polled would take all of it.
ALLOWED_CPU_S = 0.2


def cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system


def test_rank_that_waits_ten_seconds_uses_no_measurable_cpu() -> None:
    if kr.size() != 2:
        pytest.skip("two ranks show it")
    tensor = tf.ones(1_000_000)
    kr.allreduce(tensor, name="first")
    if kr.rank() == 0:
        time.sleep(WAIT_S)
    started, before = time.monotonic(), cpu_seconds()
    kr.allreduce(tensor, name="late")

    if kr.rank() == 1:
        assert time.monotonic() - started > WAIT_S / 2
        assert cpu_seconds() - before < ALLOWED_CPU_S
