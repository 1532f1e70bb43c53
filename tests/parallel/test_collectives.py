"""The values of the collectives in eager code, compared with NumPy; any number of ranks."""

from __future__ import annotations

import functools
from typing import Any

import keras
import ml_dtypes
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")
DTYPES = ("bool", *INTEGERS, *FLOATS, *COMPLEX)
OPS = ("mean", "sum", "min", "max", "product")
WITH_MEANING = [
    (dtype, op)
    for dtype in DTYPES
    for op in OPS
    if not (dtype == "bool" and op not in ("min", "max"))
    and not (dtype in COMPLEX and op in ("min", "max"))
]
WITHOUT_MEANING = [
    (dtype, op) for dtype in DTYPES for op in OPS if (dtype, op) not in WITH_MEANING
]
# Elements, given the number of ranks: none, one, around one for each rank, and a prime.
SIZES = {
    "0": lambda n: 0,
    "1": lambda n: 1,
    "n-1": lambda n: n - 1,
    "n": lambda n: n,
    "n+1": lambda n: n + 1,
    "4099": lambda n: 4099,
}
LARGE = 1_000_003


def numpy_dtype(name: str) -> Any:
    return np.dtype(getattr(ml_dtypes, name) if name == "bfloat16" else name)


def values_of(rank: int, elems: int, dtype: str, op: str) -> np.ndarray:
    """Return values that are distinct for each rank and element, as far as the dtype goes."""
    values = np.arange(elems, dtype="int64") * kr.size() + rank
    if dtype == "bool":
        return values % 3 == 0
    if dtype in INTEGERS:
        return values.astype(dtype)
    # Sums and products that 16-bit floats hold exactly.
    limit = {"product": 3, "float16": 211, "bfloat16": 31}
    values = values % limit.get(op, limit.get(dtype, 2**20))
    if dtype in COMPLEX:
        return (values + 1 - 2j * values).astype(dtype)
    return (values + 1).astype(numpy_dtype(dtype))


def reduced(parts: list[np.ndarray], op: str) -> np.ndarray:
    dtype = parts[0].dtype
    wide = [p.astype("float32") if dtype.itemsize == 2 and dtype.kind in "fV" else p for p in parts]
    ufunc = {"min": np.minimum, "max": np.maximum, "product": np.multiply}.get(op, np.add)
    total = functools.reduce(ufunc, wide)
    if op == "mean":
        total = total // len(parts) if dtype.kind in "iu" else total / len(parts)
    return total.astype(dtype)


def all_parts(elems: int, dtype: str, op: str = "sum") -> list[np.ndarray]:
    return [values_of(rank, elems, dtype, op) for rank in range(kr.size())]


@pytest.mark.parametrize("elems", SIZES)
@pytest.mark.parametrize(("dtype", "op"), WITH_MEANING)
def test_allreduce_equals_numpy(dtype: str, op: str, elems: str) -> None:
    parts = all_parts(SIZES[elems](kr.size()), dtype, op)

    result = kr.allreduce(tf.constant(parts[kr.rank()]), op)

    assert result.dtype == dtype
    if dtype in COMPLEX and op == "mean":
        np.testing.assert_allclose(result, reduced(parts, op), rtol=np.finfo(dtype).eps)
    else:
        np.testing.assert_array_equal(result, reduced(parts, op))


@pytest.mark.parametrize("dtype", DTYPES)
def test_allreduce_of_many_elements_equals_numpy(dtype: str) -> None:
    op = "max" if dtype == "bool" else "sum"
    parts = all_parts(LARGE, dtype, op)

    result = kr.allreduce(tf.constant(parts[kr.rank()]), op)

    np.testing.assert_array_equal(result, reduced(parts, op))


@pytest.mark.parametrize(("dtype", "op"), WITHOUT_MEANING)
def test_allreduce_without_meaning_for_dtype_is_refused(dtype: str, op: str) -> None:
    with pytest.raises(kr.ConfigError, match=f"op='{op}' has no meaning for dtype {dtype}; use op="):
        kr.allreduce(tf.constant(values_of(kr.rank(), 3, dtype, op)), op)


def test_allreduce_mean_of_negative_integers_rounds_down() -> None:
    result = kr.allreduce(tf.constant([-1 - kr.rank(), 1 + kr.rank()], tf.int32))

    total = kr.size() * (kr.size() + 1) // 2
    np.testing.assert_array_equal(result, [-total // kr.size(), total // kr.size()])


def test_allreduce_mean_of_float16_passes_its_range_unharmed() -> None:
    largest = tf.constant([65504.0, -65504.0], tf.float16)

    np.testing.assert_array_equal(kr.allreduce(largest), largest)


def test_allreduce_sum_of_16_bit_floats_is_rounded_once() -> None:
    # 2048 + 1 is no float16: rounding after each addition would never leave 2048.
    own = tf.constant([2048.0 if kr.rank() == 0 else 1.0], tf.float16)

    expected = np.float16(2048 + kr.size() - 1)
    np.testing.assert_array_equal(kr.allreduce(own, "sum"), [expected])


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_allreduce_keeps_a_single_rank_s_nan(dtype: str, op: str) -> None:
    last = kr.size() - 1
    own = tf.constant([np.nan if kr.rank() == last else 1.0, np.nan if kr.rank() == 0 else 1.0], dtype)

    assert np.isnan(tf.cast(kr.allreduce(own, op), tf.float32)).all()


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64"])
def test_allreduce_applies_prescale_and_postscale(dtype: str, op: str) -> None:
    parts = all_parts(7, dtype)

    result = kr.allreduce(parts[kr.rank()], op, prescale_factor=0.5, postscale_factor=4.0)

    expected = 2.0 * sum(part.astype("complex64") for part in parts)
    expected /= kr.size() if op == "mean" else 1
    eps = ml_dtypes.finfo(numpy_dtype(dtype)).eps if dtype not in COMPLEX else np.finfo(dtype).eps
    np.testing.assert_allclose(result.numpy().astype("complex64"), expected, rtol=float(eps))


def test_allreduce_prescales_before_a_sum_that_would_overflow() -> None:
    own = tf.constant([60000.0], tf.float16)

    result = kr.allreduce(own, "sum", prescale_factor=1.0 / kr.size())

    np.testing.assert_allclose(result, own, rtol=2**-10)


def test_allreduce_has_the_same_bits_on_every_rank() -> None:
    own = np.random.default_rng(kr.rank()).normal(size=4099).astype("float32")

    result = kr.allreduce(own, "sum").numpy()

    digests = kr.allgather_object(result.tobytes())
    assert len(set(digests)) == 1


@pytest.mark.parametrize(
    "make",
    [
        list,
        np.asarray,
        tf.constant,
        tf.Variable,
        keras.Variable,
        lambda v: np.asarray(v)[::-1][::-1],
        lambda v: np.asarray(v).astype("float64").astype(">f4").astype("f4"),
    ],
    ids=["list", "numpy", "tensor", "tf.Variable", "keras.Variable", "view", "converted"],
)
def test_collectives_take_whatever_becomes_a_tensor(make: Any) -> None:
    own = make([1.0 + kr.rank(), 2.0])

    first_sum = kr.size() * (kr.size() + 1) / 2
    np.testing.assert_array_equal(kr.allreduce(own, "sum"), [first_sum, 2.0 * kr.size()])
    np.testing.assert_array_equal(kr.broadcast(own, kr.size() - 1), [kr.size(), 2.0])
    np.testing.assert_array_equal(
        kr.allgather(own), np.ravel([[1.0 + rank, 2.0] for rank in range(kr.size())])
    )


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1, 1, 1, 1), (2, 3, 4, 5, 6)])
def test_collectives_keep_shapes(shape: tuple[int, ...]) -> None:
    own = tf.fill(shape, float(kr.rank()))

    assert kr.allreduce(own).shape == shape
    assert kr.broadcast(own).shape == shape
    if shape:
        assert kr.allgather(own).shape == (kr.size() * shape[0], *shape[1:])


@pytest.mark.parametrize("collective", [kr.allreduce, kr.broadcast, kr.allgather])
def test_results_do_not_alias_the_input(collective: Any) -> None:
    tensor = tf.constant([1.0 + kr.rank()] * 3)
    array = np.full(3, 1.0 + kr.rank())
    variable = tf.Variable(tensor)

    from_tensor, from_array, from_variable = map(collective, (tensor, array, variable))
    expected = from_variable.numpy().copy()
    array[:] = -1
    variable.assign([-1.0] * 3)

    np.testing.assert_array_equal(tensor, [1.0 + kr.rank()] * 3)
    for result in (from_tensor, from_array, from_variable):
        np.testing.assert_array_equal(result, expected)


def test_grouped_allreduce_equals_single_ones() -> None:
    parts = [
        [np.full((i + 1, 2), 10 * i + rank, "float32") for i in range(5)]
        for rank in range(kr.size())
    ]

    results = kr.grouped_allreduce(parts[kr.rank()], "sum")

    assert len(results) == 5
    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, sum(part[i] for part in parts))


@pytest.mark.parametrize(
    "collective", [kr.grouped_allreduce, kr.grouped_allgather, kr.grouped_broadcast]
)
def test_groups_of_nothing_are_nothing(collective: Any) -> None:
    assert collective([]) == []


@pytest.mark.parametrize("collective", [kr.grouped_allreduce, kr.grouped_allgather])
def test_groups_of_mixed_dtypes_are_refused(collective: Any) -> None:
    with pytest.raises(
        kr.ConfigError, match=r"'mixed'.*share one dtype.*\['float32', 'int32'\].*one group for each"
    ):
        collective([[1.0], [1]], name="mixed")


@pytest.mark.parametrize("dtype", DTYPES)
def test_allgather_with_unequal_rows_concatenates_in_rank_order(dtype: str) -> None:
    parts = [values_of(r, 3 * (r + 1), dtype, "sum").reshape(r + 1, 3) for r in range(kr.size())]

    result = kr.allgather(parts[kr.rank()])

    assert result.dtype == dtype
    np.testing.assert_array_equal(result, np.concatenate(parts))


@pytest.mark.parametrize("elems", [*SIZES, "1000003"])
def test_allgather_of_sizes_concatenates(elems: str) -> None:
    rows = SIZES[elems](kr.size()) if elems in SIZES else LARGE
    parts = [values_of(rank, rows, "int32", "sum") for rank in range(kr.size())]

    np.testing.assert_array_equal(kr.allgather(parts[kr.rank()]), np.concatenate(parts))


@pytest.mark.parametrize(
    "has_rows",
    [lambda r: r == 0, lambda r: r == kr.size() - 1, lambda r: r % 2 == 1, lambda r: False],
    ids=["first", "last", "odd", "none"],
)
def test_allgather_with_zero_rows_takes_the_others(has_rows: Any) -> None:
    parts = [np.full((2 * has_rows(rank), 5), rank, "int64") for rank in range(kr.size())]

    result = kr.allgather(parts[kr.rank()])

    assert result.shape == (sum(len(part) for part in parts), 5)
    np.testing.assert_array_equal(result, np.concatenate(parts))


def test_grouped_allgather_gathers_each_tensor() -> None:
    parts = [
        [np.full((rank + 1, 2), rank, "int32"), np.full(3 * (rank == 0), rank, "int32")]
        for rank in range(kr.size())
    ]

    results = kr.grouped_allgather(parts[kr.rank()])

    for i, result in enumerate(results):
        np.testing.assert_array_equal(result, np.concatenate([part[i] for part in parts]))


@pytest.mark.parametrize("elems", [*SIZES, "1000003"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_broadcast_gives_every_root_s_value(dtype: str, elems: str) -> None:
    count = SIZES[elems](kr.size()) if elems in SIZES else LARGE
    own = tf.constant(values_of(kr.rank(), count, dtype, "sum"))

    for root in range(kr.size()):
        result = kr.broadcast(own, root)
        assert result.dtype == dtype
        np.testing.assert_array_equal(result, values_of(root, count, dtype, "sum"))


def test_grouped_broadcast_takes_mixed_dtypes() -> None:
    root = kr.size() - 1
    own = [np.full(3, kr.rank(), "float32"), np.int64(kr.rank()), np.array([kr.rank() == root])]

    floats, integer, flag = kr.grouped_broadcast(own, root)

    np.testing.assert_array_equal(floats, [root] * 3)
    assert integer == root
    np.testing.assert_array_equal(flag, [True])


def test_barrier_returns_only_when_all_have_come(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = kr.broadcast_object(str(tmp_path_factory.mktemp("barrier")))
    with open(f"{folder}/{kr.rank()}", "w") as note:
        note.write("here")

    kr.barrier()

    for rank in range(kr.size()):
        with open(f"{folder}/{rank}") as note:
            assert note.read() == "here"


def test_collectives_are_matched_by_name_whatever_the_order() -> None:
    """Each rank's threads call in an order of their own."""
    import concurrent.futures

    names = [f"order/{i}" for i in range(8)]
    shift = kr.rank() * 3 % 8
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = {
            name: pool.submit(kr.allreduce, [float(names.index(name))], "sum", name=name)
            for name in names[shift:] + names[:shift]
        }
        results = {name: float(future.result(60)[0]) for name, future in futures.items()}

    assert results == {name: float(i * kr.size()) for i, name in enumerate(names)}


def test_names_are_matched_up_to_the_label() -> None:
    result = kr.allreduce([1.0], "sum", name=f"labelled#label of rank {kr.rank()}")

    np.testing.assert_array_equal(result, [kr.size()])
