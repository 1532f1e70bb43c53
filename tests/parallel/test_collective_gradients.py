"""The derivatives of the collectives: that of the sum of all ranks' losses.

The reference is one process that holds all ranks' inputs and differentiates plain TensorFlow.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

MODES = pytest.mark.parametrize("is_graph", [False, True], ids=["eager", "graph"])


def input_of(rank: int, rows: int = 4) -> np.ndarray:
    return np.random.default_rng(100 + rank).uniform(0.5, 2.0, (rows, 3)).astype("float32")


def weights_of(rank: int, elems: int) -> np.ndarray:
    """Return what makes each rank's loss depend differently on each element."""
    return np.random.default_rng(200 + rank).uniform(-1.0, 1.0, elems).astype("float32")


def loss_of(rank: int, result: tf.Tensor) -> tf.Tensor:
    flat = tf.reshape(result, [-1])
    return tf.reduce_sum(tf.constant(weights_of(rank, 64))[: tf.size(flat)] * flat * flat)


def own_gradient(
    collective: Callable[[tf.Tensor], tf.Tensor], own: np.ndarray, is_graph: bool
) -> tf.Tensor:
    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = loss_of(kr.rank(), collective(x))
        return tape.gradient(loss, x)

    return (tf.function(gradient) if is_graph else gradient)(tf.constant(own))


def joint_gradient(
    collective: Callable[[list[tf.Tensor]], tf.Tensor], inputs: list[np.ndarray]
) -> tf.Tensor:
    tensors = [tf.constant(x) for x in inputs]
    with tf.GradientTape() as tape:
        tape.watch(tensors)
        result = collective(tensors)
        loss = tf.add_n([loss_of(rank, result) for rank in range(kr.size())])
    return tape.gradient(loss, tensors)[kr.rank()]


REDUCTIONS: dict[str, Callable[[list[tf.Tensor]], tf.Tensor]] = {
    "mean": lambda parts: tf.reduce_mean(tf.stack(parts), 0),
    "sum": lambda parts: tf.reduce_sum(tf.stack(parts), 0),
    "product": lambda parts: tf.reduce_prod(tf.stack(parts), 0),
    "min": lambda parts: tf.reduce_min(tf.stack(parts), 0),
    "max": lambda parts: tf.reduce_max(tf.stack(parts), 0),
}


@MODES
@pytest.mark.parametrize("op", REDUCTIONS)
def test_gradient_of_allreduce_equals_that_of_one_process(op: Any, is_graph: bool) -> None:
    inputs = [input_of(rank) for rank in range(kr.size())]

    gradient = own_gradient(lambda x: kr.allreduce(x, op), inputs[kr.rank()], is_graph)

    np.testing.assert_allclose(gradient, joint_gradient(REDUCTIONS[op], inputs), rtol=1e-5)


@MODES
def test_gradient_of_product_is_finite_where_a_factor_is_zero(is_graph: bool) -> None:
    inputs = [input_of(rank) for rank in range(kr.size())]
    inputs[0][0, 0] = 0.0
    for values in inputs:
        values[1, 1] = 0.0

    gradient = own_gradient(lambda x: kr.allreduce(x, "product"), inputs[kr.rank()], is_graph)

    joint = joint_gradient(REDUCTIONS["product"], inputs)
    np.testing.assert_allclose(gradient, joint, rtol=1e-5, atol=1e-6)


@MODES
@pytest.mark.parametrize("op", ["min", "max"])
def test_gradient_of_a_tie_is_shared(op: Any, is_graph: bool) -> None:
    inputs = [np.ones((2, 2), "float32")] * kr.size()

    gradient = own_gradient(lambda x: kr.allreduce(x, op), inputs[kr.rank()], is_graph)

    np.testing.assert_allclose(gradient, joint_gradient(REDUCTIONS[op], inputs), rtol=1e-5)


@MODES
def test_gradient_of_allreduce_applies_the_factors(is_graph: bool) -> None:
    inputs = [input_of(rank) for rank in range(kr.size())]

    gradient = own_gradient(
        lambda x: kr.allreduce(x, "sum", prescale_factor=0.5, postscale_factor=3.0),
        inputs[kr.rank()],
        is_graph,
    )

    joint = joint_gradient(lambda parts: 3.0 * tf.add_n([0.5 * part for part in parts]), inputs)
    np.testing.assert_allclose(gradient, joint, rtol=1e-5)


@MODES
def test_gradient_of_grouped_allreduce_equals_that_of_one_process(is_graph: bool) -> None:
    inputs = [input_of(rank) for rank in range(kr.size())]

    def grouped(x: tf.Tensor) -> tf.Tensor:
        return tf.concat(kr.grouped_allreduce([x[:1], x[1:]], "sum"), 0)

    gradient = own_gradient(grouped, inputs[kr.rank()], is_graph)

    np.testing.assert_allclose(gradient, joint_gradient(REDUCTIONS["sum"], inputs), rtol=1e-5)


@MODES
@pytest.mark.parametrize(
    "rows", [lambda r: 2, lambda r: r + 1, lambda r: 2 * (r % 2), lambda r: 3 * (r == 0)]
)
def test_gradient_of_allgather_equals_that_of_one_process(rows: Any, is_graph: bool) -> None:
    inputs = [input_of(rank, rows(rank)) for rank in range(kr.size())]

    gradient = own_gradient(kr.allgather, inputs[kr.rank()], is_graph)

    assert gradient.shape == inputs[kr.rank()].shape
    joint = joint_gradient(lambda parts: tf.concat(parts, 0), inputs)
    np.testing.assert_allclose(gradient, joint, rtol=1e-5)


def test_gradient_of_allgather_with_unknown_rows_keeps_its_static_shape() -> None:
    shapes = []

    @tf.function(input_signature=[tf.TensorSpec((None, 3))])
    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            loss = tf.reduce_sum(kr.allgather(x))
        result = tape.gradient(loss, x)
        shapes.append(result.shape.as_list())
        return result

    np.testing.assert_array_equal(
        gradient(tf.ones((kr.rank(), 3))), np.full((kr.rank(), 3), kr.size())
    )
    assert shapes == [[None, 3]]


@MODES
def test_gradient_of_grouped_allgather_equals_that_of_one_process(is_graph: bool) -> None:
    inputs = [input_of(rank, 3) for rank in range(kr.size())]

    def grouped(x: tf.Tensor) -> tf.Tensor:
        first, second = kr.grouped_allgather([x[: kr.rank()], x[kr.rank() :]])
        return tf.concat([first, second], 0)

    def joint(parts: list[tf.Tensor]) -> tf.Tensor:
        firsts = [part[:rank] for rank, part in enumerate(parts)]
        seconds = [part[rank:] for rank, part in enumerate(parts)]
        return tf.concat(firsts + seconds, 0)

    gradient = own_gradient(grouped, inputs[kr.rank()], is_graph)

    np.testing.assert_allclose(gradient, joint_gradient(joint, inputs), rtol=1e-5)


@MODES
def test_gradient_of_broadcast_is_the_sum_on_the_root_and_zero_elsewhere(is_graph: bool) -> None:
    root = kr.size() - 1
    inputs = [input_of(rank) for rank in range(kr.size())]

    gradient = own_gradient(lambda x: kr.broadcast(x, root), inputs[kr.rank()], is_graph)

    joint = joint_gradient(lambda parts: parts[root], inputs)
    expected = np.zeros((4, 3)) if joint is None else joint
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


@MODES
def test_gradient_of_grouped_broadcast_skips_integers_and_what_is_not_used(is_graph: bool) -> None:
    inputs = [input_of(rank) for rank in range(kr.size())]

    def grouped(x: tf.Tensor) -> tf.Tensor:
        used, _, _ = kr.grouped_broadcast([x, tf.constant([1, 2]), 2.0 * x], 0)
        return used

    gradient = own_gradient(grouped, inputs[kr.rank()], is_graph)

    joint = joint_gradient(lambda parts: parts[0], inputs)
    expected = np.zeros((4, 3)) if joint is None else joint
    np.testing.assert_allclose(gradient, expected, rtol=1e-5)


def test_second_derivative_of_allreduce() -> None:
    own = tf.constant([1.0 + kr.rank(), 2.0])
    with tf.GradientTape() as outer:
        outer.watch(own)
        with tf.GradientTape() as inner:
            inner.watch(own)
            loss = tf.reduce_sum(kr.allreduce(own, "sum", name="second") ** 3)
        first = inner.gradient(loss, own)
    second = outer.gradient(first, own)

    total = np.array([kr.size() * (kr.size() + 1) / 2, 2.0 * kr.size()])
    np.testing.assert_allclose(first, kr.size() * 3 * total**2, rtol=1e-5)
    # The sum over the ranks is in each of the two steps back.
    np.testing.assert_allclose(second, kr.size() ** 2 * 6 * total, rtol=1e-5)


def test_gradient_through_a_loop() -> None:
    own = tf.constant([1.0, 0.5])

    @tf.function
    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = x
            for _ in tf.range(3):
                value = kr.allreduce(value, "mean") * value
            loss = tf.reduce_sum(value)
        return tape.gradient(loss, x)

    # All ranks hold the same x, so the loop computes x ** 8 on each, and the sum of the losses
    # depends on every rank's x alike.
    np.testing.assert_allclose(gradient(own), 8.0 * own.numpy() ** 7, rtol=1e-5)


def test_gradient_of_barrier_is_no_obstacle() -> None:
    @tf.function
    def gradient(x: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            kr.barrier()
            loss = tf.reduce_sum(x * x)
        return tape.gradient(loss, x)

    np.testing.assert_array_equal(gradient(tf.constant([1.0, 2.0])), [2.0, 4.0])
