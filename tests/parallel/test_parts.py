"""alltoall, reducescatter and adasum against NumPy, with their derivatives; any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
DTYPES = ("bool", *INTEGERS, *FLOATS, "complex64", "complex128")
MODES = pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
REDUCIBLE = [
    (dtype, op)
    for dtype in DTYPES
    for op in ("sum", "mean", "min", "max", "product")
    if op not in ("min", "max") or not dtype.startswith("complex")
    if op in ("min", "max") or dtype != "bool"
]
LARGE = 300_007  # elements: many windows


def values_of(rank: int, shape: Sequence[int], dtype: str) -> np.ndarray:
    """Return values that are distinct for each rank and element, as far as the dtype goes."""
    values = np.arange(int(np.prod(shape)), dtype="int64").reshape(shape) * kr.size() + rank
    if dtype == "bool":
        return values % 3 == 0
    if dtype in INTEGERS:
        return values.astype(dtype)
    values = values % (31 if dtype == "bfloat16" else 211)
    return (values + 1).astype(getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype)


def part_of(result: np.ndarray, rank: int) -> np.ndarray:
    """Cut rows as NumPy does: the first parts are one longer."""
    return np.array_split(result, kr.size())[rank]


def run(collective: Callable[..., Any], *tensors: Any, is_graph: bool = False) -> Any:
    return (tf.function(collective) if is_graph else collective)(*tensors)


def splits_of(rank: int, scale: int = 1) -> list[int]:
    """How many rows a rank has for each other: some none."""
    return [scale * ((rank + 2 * to) % 3) for to in range(kr.size())]


def exchanged(scale: int, rows: Callable[[int, int], np.ndarray]) -> np.ndarray:
    """What this rank gets, given each rank's rows: `rows(rank, number of them)`."""
    pieces = []
    for rank in range(kr.size()):
        splits = splits_of(rank, scale)
        begin = sum(splits[: kr.rank()])
        pieces.append(rows(rank, sum(splits))[begin : begin + splits[kr.rank()]])
    return np.concatenate(pieces)


@MODES
@pytest.mark.parametrize("dtype", DTYPES)
def test_alltoall_with_splits_gives_each_rank_its_rows(dtype: str, is_graph: bool) -> None:
    splits = splits_of(kr.rank())
    own = values_of(kr.rank(), (sum(splits), 3), dtype)

    rows, received = run(lambda x: kr.alltoall(x, splits), own, is_graph=is_graph)

    assert rows.dtype == dtype
    np.testing.assert_array_equal(
        rows, exchanged(1, lambda rank, count: values_of(rank, (count, 3), dtype))
    )
    assert received.dtype == "int32"
    np.testing.assert_array_equal(received, [splits_of(r)[kr.rank()] for r in range(kr.size())])


@pytest.mark.parametrize("dtype", ["int64", "int32"])
def test_alltoall_returns_splits_as_they_were_given(dtype: str) -> None:
    rows, received = kr.alltoall(np.zeros((kr.size(), 2)), tf.ones(kr.size(), dtype))

    assert rows.shape == (kr.size(), 2)
    assert received.dtype == dtype


def test_alltoall_of_much_arrives_whole() -> None:
    scale = LARGE // kr.size()

    rows, _ = kr.alltoall(
        values_of(kr.rank(), (sum(splits_of(kr.rank(), scale)),), "int32"),
        splits_of(kr.rank(), scale),
    )

    expected = exchanged(scale, lambda rank, count: values_of(rank, (count,), "int32"))
    np.testing.assert_array_equal(rows, expected)


@MODES
def test_alltoall_without_splits_shares_equally(is_graph: bool) -> None:
    own = values_of(kr.rank(), (2 * kr.size(), 2), "float32")

    rows = run(kr.alltoall, own, is_graph=is_graph)

    mine = slice(2 * kr.rank(), 2 * kr.rank() + 2)
    np.testing.assert_array_equal(
        rows,
        np.concatenate([values_of(r, own.shape, "float32")[mine] for r in range(kr.size())]),
    )


@pytest.mark.parametrize("shape", [(0,), (0, 3), (4, 0)])
def test_alltoall_of_nothing_is_nothing(shape: tuple[int, ...]) -> None:
    splits = [shape[0] if rank == 0 else 0 for rank in range(kr.size())]

    rows, received = kr.alltoall(np.zeros(shape), splits)

    count = shape[0] if kr.rank() == 0 else 0
    assert rows.shape == (count * kr.size(), *shape[1:])
    np.testing.assert_array_equal(received, [count] * kr.size())


@MODES
@pytest.mark.parametrize("dtype, op", REDUCIBLE)
def test_reducescatter_gives_each_rank_its_rows(dtype: str, op: Any, is_graph: bool) -> None:
    parts = [values_of(rank, (2 * kr.size() + 1, 3), dtype) for rank in range(kr.size())]
    if op == "product":
        parts = [part % 3 if dtype in INTEGERS else part / part * 2 for part in parts]
        parts = [part.astype(parts[0].dtype) for part in parts]

    rows = run(lambda x: kr.reducescatter(x, op), parts[kr.rank()], is_graph=is_graph)

    assert rows.dtype == dtype
    whole = kr.allreduce(parts[kr.rank()], op).numpy()
    np.testing.assert_array_equal(rows, part_of(whole, kr.rank()))


@pytest.mark.parametrize("rows", [0, 1, 7, LARGE])
def test_reducescatter_of_rows_equals_numpy(rows: int) -> None:
    parts = [values_of(rank, (rows,), "int64") for rank in range(kr.size())]

    result = kr.reducescatter(parts[kr.rank()], "sum")

    np.testing.assert_array_equal(result, part_of(np.sum(parts, axis=0), kr.rank()))


def test_reducescatter_means_by_default_and_applies_factors() -> None:
    own = np.full(2 * kr.size(), 1.0 + kr.rank())
    mean = (kr.size() + 1) / 2

    np.testing.assert_array_equal(kr.reducescatter(own), [mean] * 2)
    np.testing.assert_array_equal(
        kr.reducescatter(own, "mean", prescale_factor=4.0, postscale_factor=0.5), [2 * mean] * 2
    )


def test_grouped_reducescatter_equals_single_ones() -> None:
    parts = [
        [values_of(rank, (3 * i, i + 1), "float32") for i in range(4)] for rank in range(kr.size())
    ]

    results = kr.grouped_reducescatter(parts[kr.rank()], "sum")

    for i, result in enumerate(results):
        total = sum(part[i] for part in parts)
        np.testing.assert_array_equal(result, part_of(total, kr.rank()))


def adasum(parts: list[np.ndarray]) -> np.ndarray:
    """The reference, in float64; see kr.allreduce."""

    def pair(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        dot, aa, bb = (float(np.vdot(x, y).real) for x, y in ((a, b), (a, a), (b, b)))
        return (1 - dot / (2 * aa) if aa else 1) * a + (1 - dot / (2 * bb) if bb else 1) * b

    if len(parts) == 1:
        return parts[0]
    if len(parts) == 3:
        return pair(pair(parts[0], parts[1]), parts[2])
    half = len(parts) // 2
    return pair(adasum(parts[:half]), adasum(parts[half:]))


@MODES
@pytest.mark.parametrize("dtype", [*FLOATS, "complex64", "complex128"])
def test_adasum_equals_the_reference(dtype: str, is_graph: bool) -> None:
    rng = [np.random.default_rng(rank) for rank in range(kr.size())]
    wide = "complex128" if dtype.startswith("complex") else "float64"
    cast = getattr(ml_dtypes, dtype) if dtype == "bfloat16" else dtype
    parts = [(r.normal(size=(51, 3)) + 0.3).astype(cast) for r in rng]

    result = run(lambda x: kr.allreduce(x, "adasum"), parts[kr.rank()], is_graph=is_graph)

    assert result.dtype == dtype
    tolerance = {"float16": 2e-3, "bfloat16": 2e-2}.get(dtype, 1e-5)
    expected = adasum([part.astype(wide) for part in parts])
    np.testing.assert_allclose(result.numpy().astype(wide), expected, tolerance, tolerance)


def test_adasum_of_a_group_has_dot_products_for_each_tensor() -> None:
    rng = [np.random.default_rng(rank) for rank in range(kr.size())]
    parts = [[r.normal(size=size) for size in (1, 0, 1000, 7)] for r in rng]

    results = kr.grouped_allreduce(parts[kr.rank()], "adasum", postscale_factor=2.0)

    for i, result in enumerate(results):
        np.testing.assert_allclose(result, 2 * adasum([part[i] for part in parts]), rtol=1e-12)


def test_adasum_of_equal_tensors_is_that_tensor_and_of_orthogonal_ones_their_sum() -> None:
    own = np.zeros(kr.size())
    own[kr.rank()] = 2.0

    np.testing.assert_allclose(kr.allreduce(np.arange(5.0), "adasum"), np.arange(5.0))
    np.testing.assert_array_equal(kr.allreduce(own, "adasum"), [2.0] * kr.size())


def weights_of(rank: int, elems: int) -> np.ndarray:
    """Return what makes each rank's loss depend differently on each element."""
    return np.random.default_rng(200 + rank).uniform(-1.0, 1.0, elems)


def loss_of(rank: int, result: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(result, [-1])
    return tf.reduce_sum(tf.constant(weights_of(rank, 64))[: tf.size(flat)] * flat * flat)


def own_gradient(collective: Callable[[Any], Any], own: np.ndarray, is_graph: bool) -> Any:
    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(kr.rank(), collective(x))
        return tape.gradient(loss, x)

    return run(gradient, tf.constant(own), is_graph=is_graph)


def numerical_gradient(
    results: Callable[[list[np.ndarray]], list[np.ndarray]], inputs: list[np.ndarray]
) -> np.ndarray:
    """Central differences of the sum of all ranks' losses, by this rank's input.

    `results` gives every rank's result of all ranks' inputs.
    """

    def total(own: np.ndarray) -> float:
        everything = [own if rank == kr.rank() else x for rank, x in enumerate(inputs)]
        flat = [result.ravel() for result in results(everything)]
        return sum(
            float(np.sum(weights_of(rank, 64)[: x.size] * x * x)) for rank, x in enumerate(flat)
        )

    own = inputs[kr.rank()]
    gradient = np.zeros_like(own)
    for place in np.ndindex(*own.shape):
        step = np.zeros_like(own)
        step[place] = 1e-6
        gradient[place] = (total(own + step) - total(own - step)) / 2e-6
    return gradient


def random_inputs(rows: Callable[[int], int]) -> list[np.ndarray]:
    return [
        np.random.default_rng(100 + rank).uniform(0.5, 2.0, (rows(rank), 2))
        for rank in range(kr.size())
    ]


REDUCTIONS: dict[str, Callable[..., np.ndarray]] = {
    "sum": np.sum,
    "mean": np.mean,
    "min": np.min,
    "max": np.max,
    "product": np.prod,
}


@MODES
@pytest.mark.parametrize("op", REDUCTIONS)
def test_gradient_of_reducescatter_agrees_with_the_numerical_one(op: Any, is_graph: bool) -> None:
    inputs = random_inputs(lambda _: kr.size() + 1)

    def everybody(parts: list[np.ndarray]) -> list[np.ndarray]:
        return np.array_split(REDUCTIONS[op](np.stack(parts), axis=0), kr.size())

    gradient = own_gradient(lambda x: kr.reducescatter(x, op), inputs[kr.rank()], is_graph)

    np.testing.assert_allclose(gradient, numerical_gradient(everybody, inputs), 1e-5, 1e-7)


def test_gradient_of_grouped_reducescatter_applies_the_factors() -> None:
    inputs = random_inputs(lambda _: 2 * kr.size())
    size = kr.size()

    def grouped(x: tf.Tensor) -> tf.Tensor:
        first, second = kr.grouped_reducescatter(
            [x[:size], x[size:]], "mean", prescale_factor=0.5, postscale_factor=3.0
        )
        return tf.concat([first, second], 0)

    def everybody(parts: list[np.ndarray]) -> list[np.ndarray]:
        mean = 1.5 * np.mean(parts, axis=0)
        return [mean[[rank, size + rank]] for rank in range(size)]

    gradient = own_gradient(grouped, inputs[kr.rank()], is_graph=True)

    np.testing.assert_allclose(gradient, numerical_gradient(everybody, inputs), 1e-5, 1e-7)


@MODES
@pytest.mark.parametrize("has_splits", [False, True])
def test_gradient_of_alltoall_agrees_with_the_numerical_one(
    has_splits: bool, is_graph: bool
) -> None:
    def splits(rank: int) -> list[int]:
        return splits_of(rank) if has_splits else [2] * kr.size()

    inputs = random_inputs(lambda rank: sum(splits(rank)))

    def everybody(parts: list[np.ndarray]) -> list[np.ndarray]:
        cut = [np.split(x, np.cumsum(splits(rank))[:-1]) for rank, x in enumerate(parts)]
        return [np.concatenate([pieces[to] for pieces in cut]) for to in range(kr.size())]

    def collective(x: tf.Tensor) -> tf.Tensor:
        return kr.alltoall(x, splits(kr.rank()))[0] if has_splits else kr.alltoall(x)

    gradient = own_gradient(collective, inputs[kr.rank()], is_graph)

    np.testing.assert_allclose(gradient, numerical_gradient(everybody, inputs), 1e-5, 1e-7)


@MODES
def test_gradient_of_adasum_agrees_with_the_numerical_one(is_graph: bool) -> None:
    inputs = random_inputs(lambda _: 3)

    gradient = own_gradient(
        lambda x: kr.allreduce(x, "adasum", postscale_factor=0.5), inputs[kr.rank()], is_graph
    )

    numerical = numerical_gradient(lambda parts: [0.5 * adasum(parts)] * kr.size(), inputs)
    np.testing.assert_allclose(gradient, numerical, 1e-5, 1e-7)


def test_gradient_of_adasum_is_finite_where_a_tensor_is_zero() -> None:
    own = np.zeros((2, 2)) if kr.rank() == 0 else np.ones((2, 2))

    gradient = own_gradient(lambda x: kr.allreduce(x, "adasum"), own, is_graph=False)

    assert np.all(np.isfinite(gradient))


def test_static_shapes_keep_all_but_the_rows() -> None:
    @tf.function(input_signature=[tf.TensorSpec((None, 3)), tf.TensorSpec(None)])
    def shapes(x: tf.Tensor, unknown: tf.Tensor) -> Any:
        rows, received = kr.alltoall(x, tf.zeros(kr.size(), tf.int32))
        assert rows.shape.as_list() == [None, 3]
        assert received.shape.as_list() == [None]
        assert kr.reducescatter(x).shape.as_list() == [None, 3]
        assert kr.alltoall(unknown).shape.rank is None
        return kr.reducescatter(unknown)

    assert shapes(tf.ones((0, 3)), tf.ones((kr.size(), 2))).shape == (1, 2)
