"""Random collectives of every kind, size and dtype, each compared with NumPy: 100,000 on 2 ranks.

More ranks than cores take longer, so that 4 ranks run 30,000 unless told otherwise:
`pytest --stress-requests N --stress-seed S` sets another number, and repeats a run that failed.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64", "complex64", "complex128")
SIZES = (0, 1, 2, 3, 7, 64, 1000, 4099)
LARGE_SIZES = (70_000, 300_001)
PROGRAMS, REQUESTS_IN_PROGRAM, LARGE_IN_PROGRAM = 6, 125, 2


@dataclasses.dataclass(frozen=True)
class Call:
    """One request, the same on every rank but for its values and, of a gather, its rows."""

    seed: tuple[int, ...]
    kind: str
    dtype: str
    size: int
    op: str = "sum"
    root: int = 0
    factor: float = 1.0

    def rows(self, rank: int) -> int:
        return (self.size + 5 * rank) % 11 if self.kind == "allgather" else self.size

    def values(self, rank: int, step: int) -> np.ndarray:
        """What `rank` brings: small whole numbers, whose sums are the same in any order."""
        base = np.random.default_rng((*self.seed, rank)).integers(0, 3, self.rows(rank))
        if self.dtype == "bool":
            return base % 2 == step % 2
        return (base + step).astype(
            ml_dtypes.bfloat16 if self.dtype == "bfloat16" else np.dtype(self.dtype)
        )

    @functools.cache  # noqa: B019 - as long as the program
    def expected(self, step: int) -> np.ndarray:
        parts = [self.values(rank, step) for rank in range(kr.size())]
        if self.kind == "allgather":
            return np.concatenate(parts)
        if self.kind == "broadcast":
            return parts[self.root]
        total = parts[0]
        for part in parts[1:]:
            if self.op in ("sum", "mean"):
                total = total + part
            elif self.op == "product":
                total = total * part
            else:
                total = np.minimum(total, part) if self.op == "min" else np.maximum(total, part)
        if self.op == "mean" and self.dtype in INTEGERS:
            return total // kr.size()
        if self.op == "mean":
            total = total / np.asarray(kr.size(), total.dtype)
        return total * np.asarray(self.factor, total.dtype) if self.factor != 1.0 else total

    def run(self, tensor: tf.Tensor, name: str) -> tf.Tensor:
        if self.kind == "allgather":
            return kr.allgather(tensor, name=name)
        if self.kind == "broadcast":
            return kr.broadcast(tensor, self.root, name=name)
        if self.kind == "group":
            half = self.size // 2
            parts = kr.grouped_allreduce([tensor[:half], tensor[half:]], self.op, name=name)
            return tf.concat(parts, 0)
        # Two powers of two, so that both factors are used and every result is exact.
        factors = {} if self.factor == 1.0 else {"prescale_factor": 2, "postscale_factor": 0.25}
        return kr.allreduce(tensor, self.op, name=name, **factors)


def random_call(rng: np.random.Generator, seed: tuple[int, ...], *, is_large: bool) -> Call:
    kind = str(rng.choice(["allreduce", "group", "allgather", "broadcast"], p=[0.5, 0.2, 0.1, 0.2]))
    dtype = str(rng.choice(["bool", *INTEGERS, *FLOATS]))
    size = int(rng.choice(LARGE_SIZES if is_large else SIZES))
    ops = {"bool": ["min", "max"], "complex64": ["sum", "mean", "product"]}
    ops["complex128"] = ops["complex64"]
    op = str(rng.choice(ops.get(dtype, ["sum", "mean", "min", "max", "product"])))
    scales = kind == "allreduce" and dtype in FLOATS and op in ("sum", "mean")
    factor = 0.5 if scales and rng.integers(2) else 1.0
    return Call(seed, kind, dtype, size, op, int(rng.integers(kr.size())), factor)


class Program:
    """Many requests in one graph, made in another order on each rank."""

    def __init__(self, seed: int, number: int) -> None:
        rng = np.random.default_rng((seed, number))
        self.calls = [
            random_call(rng, (seed, number, i), is_large=i < LARGE_IN_PROGRAM)
            for i in range(REQUESTS_IN_PROGRAM)
        ]
        order = np.random.default_rng((seed, number, kr.rank())).permutation(len(self.calls))
        own = [call.values(kr.rank(), 0) for call in self.calls]

        @tf.function
        def run(step: tf.Tensor) -> list[tf.Tensor]:
            results: list[Any] = [None] * len(self.calls)
            for i in order:
                values = tf.constant(own[i])
                if values.dtype == tf.bool:
                    values = tf.math.logical_xor(values, tf.equal(step % 2, 1))
                else:
                    values = values + tf.cast(step, values.dtype)
                results[i] = self.calls[i].run(values, f"stress/{seed}/{number}/{i}")
            kr.barrier(name=f"stress/{seed}/{number}/barrier")
            return results

        self.graph = run
        self._num_runs = 0

    def run_and_compare(self, step: int) -> int:
        """Run all requests; return how many. The ranks share the comparing, in turns."""
        self._num_runs += 1
        results = self.graph(tf.constant(step))
        for i, (call, result) in enumerate(zip(self.calls, results, strict=True)):
            if (i + self._num_runs) % kr.size() != kr.rank():
                continue
            expected = call.expected(step)
            is_exact = call.op != "mean" or call.dtype not in FLOATS or kr.size() in (1, 2, 4)
            tolerance = 0 if is_exact else 1e-2
            value = result.numpy()
            if value.shape != expected.shape or not np.allclose(
                value.astype(np.complex128), expected.astype(np.complex128), tolerance, 0
            ):
                pytest.fail(f"{call} in step {step}: got {value}, expected {expected}")
        return len(self.calls) + 1


@pytest.mark.timeout(600)
def test_random_collectives_of_two_threads_agree_with_numpy(pytestconfig: pytest.Config) -> None:
    wanted = pytestconfig.getoption("--stress-requests")
    if wanted is None:
        wanted = {2: 100_000, 4: 30_000}.get(kr.size(), 5_000)
    seed = pytestconfig.getoption("--stress-seed")
    seed = kr.broadcast_object(
        int(np.random.default_rng().integers(2**31)) if seed is None else seed
    )
    print(f"repeat with --stress-seed {seed}")
    programs = [Program(seed, number) for number in range(PROGRAMS)]

    def run_some(own_programs: list[Program]) -> int:
        done = 0
        step = 0
        while done < wanted / 2:
            for program in own_programs:
                done += program.run_and_compare(step % 3)
            step += 1
        return done

    # What one thread submits meets what the other does in another order on each rank, each time.
    with concurrent.futures.ThreadPoolExecutor(2) as threads:
        done = sum(threads.map(run_some, [programs[::2], programs[1::2]]))
    assert done >= wanted
