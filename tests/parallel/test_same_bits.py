"""Same inputs, same ranks: the same bits in every run and on every rank, whoever comes late."""

from __future__ import annotations

import concurrent.futures
import hashlib
import random
import time

import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

# One step, one piece, several pieces for each rank; dtypes that round after each addition.
SIZES = (5, 4099, 300_001)
DTYPES = (tf.float32, tf.bfloat16, tf.float16)
RUNS = 6
LATEST_S = 0.004


def late_calls() -> list:
    """Sums whose bits would change with the order of the additions, under names of their own."""
    # Magnitudes from 1e-3 to 1e3, so that nearly every addition rounds.
    rng = np.random.default_rng(kr.rank())
    calls = []
    for elems in SIZES:
        own = rng.normal(size=elems) * 10.0 ** rng.integers(-3, 4, elems)
        for dtype in DTYPES:
            values = tf.cast(tf.constant(own), dtype)
            label = f"bits/{elems}/{dtype.name}"
            calls += [
                lambda v=values, n=label: kr.allreduce(v, "sum", name=f"{n}/sum"),
                lambda v=values, n=label: kr.allreduce(v, "mean", name=f"{n}/mean"),
                lambda v=values, n=label: kr.allgather(
                    kr.reducescatter(v, "sum", name=f"{n}/part"), name=f"{n}/whole"
                ),
            ]
        values = tf.constant(own.astype("float32"))
        calls += [
            lambda v=values, n=elems: kr.allreduce(v, "adasum", name=f"bits/{n}/adasum"),
            lambda v=values, n=elems: kr.allreduce(v, compression="fp16", name=f"bits/{n}/fp16"),
        ]
    return calls


def digest(calls: list, threads: concurrent.futures.Executor) -> str:
    """Make all calls, in an order and at moments that differ on each rank and in each run."""
    rng = random.Random()

    def late(call) -> bytes:
        time.sleep(rng.uniform(0, LATEST_S))
        return call().numpy().tobytes()

    order = rng.sample(range(len(calls)), len(calls))
    results = {i: threads.submit(late, calls[i]) for i in order}
    parts = [results[i].result() for i in range(len(calls))]
    return hashlib.sha256(b"".join(parts)).hexdigest()


def test_late_ranks_and_other_orders_change_no_bit() -> None:
    if kr.size() == 1:
        pytest.skip("one rank adds nothing")
    calls = late_calls()
    # As many threads as calls: each rank has its own order, and all must be able to meet.
    with concurrent.futures.ThreadPoolExecutor(len(calls)) as threads:
        digests = [digest(calls, threads) for _ in range(RUNS)]
        kr.shutdown()
        kr.init()
        digests.append(digest(calls, threads))

    of_all_ranks = kr.allgather_object(digests)
    assert len({each for of_rank in of_all_ranks for each in of_rank}) == 1, of_all_ranks
