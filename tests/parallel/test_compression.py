"""16 bits on the wire. The ranks of these tests are one host's, so a flat ring is the wire here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

NARROW = {"fp16": tf.float16, "bf16": tf.bfloat16}
# Half of the distance between 1 and the next number.
ROUNDING = {"fp16": 2.0**-11, "bf16": 2.0**-8}

COMPRESSIONS = pytest.mark.parametrize("compression", NARROW)
MODES = pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])
needs_others = pytest.mark.usefixtures("_other_ranks")


@pytest.fixture
def _other_ranks() -> None:
    if kr.size() == 1:
        pytest.skip("one rank sends nothing")


@pytest.fixture
def _ring(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let allreduce go around a ring, as it does between hosts."""
    kr.shutdown()
    monkeypatch.setenv("KERAS_RING_ALGORITHM", "ring")
    kr.init()
    yield
    kr.shutdown()


ring = pytest.mark.usefixtures("_ring")


def values_of(rank: int, dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(300 + rank).uniform(0.1, 3.0, 1234).astype(dtype)


def exact(op: str, dtype: str = "float64") -> np.ndarray:
    rows = np.stack([values_of(rank, dtype).astype("float64") for rank in range(kr.size())])
    return {"mean": rows.mean(0), "sum": rows.sum(0), "max": rows.max(0)}[op]


def assert_fits(result: Any, compression: str) -> None:
    narrowed = tf.cast(tf.cast(result, NARROW[compression]), result.dtype)
    np.testing.assert_array_equal(result, narrowed)


@needs_others
@ring
@MODES
@COMPRESSIONS
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("op", ["mean", "sum", "max"])
def test_each_transfer_rounds_once(op: Any, dtype: str, compression: Any, is_graph: bool) -> None:
    def reduce(x: tf.Tensor) -> tf.Tensor:
        return kr.allreduce(x, op, name="compressed", compression=compression)

    result = (tf.function(reduce) if is_graph else reduce)(tf.constant(values_of(kr.rank(), dtype)))

    assert_fits(result, compression)
    tolerance = kr.size() * ROUNDING[compression] * 1.01
    np.testing.assert_allclose(result, exact(op, dtype), rtol=tolerance)
    everybodys = kr.allgather(result[tf.newaxis]).numpy()
    assert all(row.tobytes() == everybodys[0].tobytes() for row in everybodys)


@ring
@COMPRESSIONS
def test_small_whole_numbers_are_exact(compression: Any) -> None:
    tensors = [tf.range(60.0) + kr.rank(), tf.fill([3, 2], 2.0 * kr.rank())]

    results = kr.grouped_allreduce(tensors, "sum", compression=compression)

    ranks = kr.size() * (kr.size() - 1) / 2
    np.testing.assert_array_equal(results[0], np.arange(60.0) * kr.size() + ranks)
    np.testing.assert_array_equal(results[1], np.full((3, 2), 2 * ranks))


@ring
@COMPRESSIONS
@pytest.mark.parametrize("dtype", ["int32", "int64", "float16", "bfloat16", "complex64"])
def test_other_dtypes_travel_as_they_are(dtype: str, compression: Any) -> None:
    x = tf.cast(tf.range(50) * 7 + 1001 * kr.rank(), dtype)

    plain = kr.allreduce(x, "sum")
    compressed = kr.allreduce(x, "sum", compression=compression)

    np.testing.assert_array_equal(plain, compressed)


@COMPRESSIONS
def test_within_a_host_nothing_is_rounded(compression: Any) -> None:
    x = values_of(kr.rank())

    plain = kr.allreduce(x)
    compressed = kr.allreduce(x, compression=compression)

    np.testing.assert_array_equal(plain, compressed)


@needs_others
@ring
def test_beyond_65504_fp16_is_infinite_and_bf16_is_not() -> None:
    x = tf.constant([40000.0, -40000.0, 1.0])

    half = kr.allreduce(x, "sum", compression=kr.compression.fp16)
    brain = kr.allreduce(x, "sum", compression=kr.compression.bf16)

    np.testing.assert_array_equal(half, [np.inf, -np.inf, kr.size()])
    np.testing.assert_allclose(brain, np.array(x) * kr.size(), rtol=kr.size() * ROUNDING["bf16"])


@ring
@MODES
@COMPRESSIONS
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_gradient_goes_through_the_codec_too(op: Any, compression: Any, is_graph: bool) -> None:
    def gradient(x: tf.Tensor, weights: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            result = kr.allreduce(x, op, name="there", compression=compression)
            loss = tf.reduce_sum(weights * result)
        return tape.gradient(loss, x)

    weights = tf.constant(values_of(kr.rank()))
    got = (tf.function(gradient) if is_graph else gradient)(tf.ones(1234), weights)

    # The derivative is the reduction of the weights, which are no 16-bit floats.
    if kr.size() > 1:
        assert_fits(got, compression)
    tolerance = kr.size() * ROUNDING[compression] * 1.01
    np.testing.assert_allclose(got, exact(op), rtol=tolerance)


@ring
@COMPRESSIONS
def test_gradient_of_max_finds_who_holds_a_rounded_result(compression: Any) -> None:
    x = tf.constant([0.1 + kr.rank(), 1.7 - kr.rank()])
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = tf.reduce_sum(kr.allreduce(x, "max", compression=compression))

    held = [float(kr.rank() == kr.size() - 1), float(kr.rank() == 0)]
    np.testing.assert_array_equal(tape.gradient(loss, x), np.array(held) * kr.size())


@pytest.mark.parametrize(
    "call",
    [
        lambda: kr.allreduce([1.0], name="k#dense/kernel", compression="int7"),
        lambda: kr.grouped_allreduce([[1.0]], name="k#dense/kernel", compression="int7"),
        lambda: kr.DistributedOptimizer("sgd", compression="int7"),
    ],
    ids=["allreduce", "grouped_allreduce", "DistributedOptimizer"],
)
def test_unknown_compression_is_refused_with_the_known_ones(call: Any) -> None:
    with pytest.raises(
        kr.ConfigError,
        match="compression='int7' is unknown; expected None or one of 'fp16', 'bf16'",
    ):
        call()


def test_adasum_takes_no_compression() -> None:
    with pytest.raises(kr.ConfigError, match="'dense/kernel': compression='fp16' goes with"):
        kr.allreduce([1.0], "adasum", name="k#dense/kernel", compression="fp16")


@needs_others
@pytest.mark.parametrize("others", [None, "bf16"])
def test_ranks_that_disagree_all_get_an_error_with_both_values(others: Any) -> None:
    own = "fp16" if kr.rank() == kr.size() - 1 else others

    with pytest.raises(
        kr.MismatchError, match="'dense/kernel': ranks disagree on compression"
    ) as e:
        kr.allreduce([1.0], name="k#dense/kernel", compression=own)

    assert str(others or "none") in str(e.value)
    assert "fp16" in str(e.value)
    np.testing.assert_array_equal(kr.allreduce([1.0], "sum", name="next"), [kr.size()])


def test_wrapping_again_with_another_compression_is_refused() -> None:
    optimizer = kr.DistributedOptimizer(keras.optimizers.SGD(), compression="fp16")

    assert kr.DistributedOptimizer(optimizer, compression="fp16") is optimizer
    with pytest.raises(
        kr.ConfigError, match="distributed with compression='fp16' already, and compression=None"
    ):
        kr.DistributedOptimizer(optimizer)


def trained(compression: Any, x: np.ndarray, y: np.ndarray, *, is_distributed: bool) -> list[Any]:
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.Input((5,)), keras.layers.Dense(4), keras.layers.Dense(1)])
    optimizer: Any = keras.optimizers.SGD(0.05)
    if is_distributed:
        optimizer = kr.DistributedOptimizer(optimizer, compression=compression)
    model.compile(optimizer, "mse")
    with contextlib.redirect_stdout(None):
        model.fit(x, y, batch_size=len(x), epochs=5, shuffle=False, verbose=0)
    return [np.array(weight) for weight in model.get_weights()]


@ring
@COMPRESSIONS
def test_optimizer_trains_like_one_process_but_for_rounding(compression: Any) -> None:
    random = np.random.default_rng(7)
    x = random.normal(size=(kr.size(), 8, 5)).astype("float32")
    y = random.normal(size=(kr.size(), 8, 1)).astype("float32")

    weights = trained(compression, x[kr.rank()], y[kr.rank()], is_distributed=True)

    alone = trained(None, x.reshape(-1, 5), y.reshape(-1, 1), is_distributed=False)
    for got, wanted in zip(weights, alone, strict=True):
        np.testing.assert_allclose(got, wanted, atol=4 * ROUNDING[compression])
    everybodys = kr.allgather_object([weight.tobytes() for weight in weights])
    assert all(one == everybodys[0] for one in everybodys)
    if kr.size() > 1:
        plain = trained(None, x[kr.rank()], y[kr.rank()], is_distributed=True)
        assert any((got != other).any() for got, other in zip(weights, plain, strict=True))
