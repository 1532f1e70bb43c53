"""What gradients.py knows: tensors, IndexedSlices, None, values that overwrite; and the overlap."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr
from keras_ring.gradients import agree, reduce_gradients
from keras_ring.reduction import Reduction


def test_reduce_gradients_with_none_keeps_places() -> None:
    variables = [tf.Variable([0.0]), tf.Variable([0.0]), tf.Variable([[0.0]])]
    value = float(kr.rank() + 1)

    reduced = reduce_gradients(
        [tf.constant([value]), None, tf.constant([[2 * value]])],
        variables,
        Reduction(),
        scope="none",
    )

    mean = (kr.size() + 1) / 2
    assert reduced[1] is None
    np.testing.assert_allclose(reduced[0], [mean])
    np.testing.assert_allclose(reduced[2], [[2 * mean]])


@pytest.mark.parametrize("index_dtype", ["int32", "int64"])
@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("is_graph", [False, True])
def test_slices_of_all_ranks_equal_the_dense_gradient(
    index_dtype: str, op: str, is_graph: bool
) -> None:
    rank, size = kr.rank(), kr.size()
    # Ids repeat within and among ranks; the last rank has none when there are several.
    rows = [[] if r == size - 1 and size > 1 else [0, 0, 1 + r] for r in range(size)]
    variable = tf.Variable(tf.zeros((6, 2)))

    def run(values: tf.Tensor, indices: tf.Tensor) -> tf.IndexedSlices:
        slices = tf.IndexedSlices(values, indices, tf.constant([6, 2]))
        return reduce_gradients([slices], [variable], Reduction(op), scope="slices")[0]

    values = np.arange(len(rows[rank]) * 2, dtype="float32").reshape(-1, 2) + rank
    reduced = (tf.function(run) if is_graph else run)(
        tf.constant(values), tf.constant(rows[rank], index_dtype)
    )

    expected = np.zeros((6, 2), "float32")
    for r, ids in enumerate(rows):
        own = np.arange(len(ids) * 2, dtype="float32").reshape(-1, 2) + r
        np.add.at(expected, np.asarray(ids, int), own)
    if op == "mean":
        expected /= size
    assert isinstance(reduced, tf.IndexedSlices)
    assert reduced.indices.dtype == index_dtype
    np.testing.assert_allclose(tf.convert_to_tensor(reduced), expected, rtol=1e-6)


def test_values_that_overwrite_their_variable_are_reduced_with_max() -> None:
    variable = keras.Variable([0.0, 0.0])
    variable.overwrite_with_gradient = True
    own = tf.constant([float(kr.rank()), -float(kr.rank())])

    reduced = reduce_gradients([own], [variable], Reduction(), scope="overwrite")[0]

    np.testing.assert_array_equal(reduced, [kr.size() - 1, 0.0])


def test_gradients_in_flight_at_once_are_not_mixed_up() -> None:
    size = kr.size()
    variables = [tf.Variable(tf.zeros((64, 2000 + i))) for i in range(8)]

    @tf.function
    def run(start: tf.Tensor) -> list[tf.Tensor]:
        # Costly enough for TensorFlow to give each to a thread of its own.
        own = [
            tf.fill((64, 1), start + float(i * size)) @ tf.ones((1, v.shape[1]))
            for i, v in enumerate(variables)
        ]
        return reduce_gradients(own, variables, Reduction("sum"), scope="at once")

    for repetition in range(100):
        reduced = run(tf.constant(float(repetition + kr.rank())))
        for i, value in enumerate(reduced):
            total = sum(repetition + r + i * size for r in range(size))
            assert tf.reduce_min(value) == tf.reduce_max(value) == float(total)


def test_small_gradients_share_requests_and_large_ones_do_not() -> None:
    shapes = [(3,), (200, 200), (5,), (), (0, 7), (64, 1)]
    variables = [tf.Variable(tf.zeros(shape)) for shape in shapes]
    variables.append(tf.Variable(tf.zeros(4, tf.float64)))

    @tf.function
    def run(start: tf.Tensor) -> list[tf.Tensor]:
        own = [tf.fill(v.shape, tf.cast(start + i, v.dtype)) for i, v in enumerate(variables)]
        return reduce_gradients(own, variables, Reduction(), scope="groups")

    reduced = run(tf.constant(float(kr.rank())))

    mean = (kr.size() - 1) / 2
    for i, (value, variable) in enumerate(zip(reduced, variables, strict=True)):
        np.testing.assert_allclose(value, np.full(variable.shape, mean + i), rtol=1e-6)
        assert value.dtype == variable.dtype
    ops = run.get_concrete_function(tf.constant(0.0)).graph.get_operations()
    sizes = sorted(len(op.inputs) for op in ops if op.type == "KerasRingAllreduce")
    assert sizes == [1, 1, 5]  # float64, the large one, all other


def test_ranks_that_disagree_within_a_group_are_told_the_variable() -> None:
    if kr.size() == 1:
        pytest.skip("one rank agrees with itself")
    odd = kr.rank() == kr.size() - 1
    variables = [
        tf.Variable([0.0], name="first"),
        tf.Variable([0.0, 0.0][: 1 if odd else 2], name="odd"),
        tf.Variable([0.0], name="last"),
    ]

    with pytest.raises(kr.MismatchError, match=r"ranks disagree on shape of 'odd:0'.*\(2,\)"):
        reduce_gradients(
            [tf.ones_like(v) for v in variables], variables, Reduction(), scope="group of one odd"
        )


def test_ranks_that_group_otherwise_are_told_at_once() -> None:
    if kr.size() == 1:
        pytest.skip("one rank agrees with itself")
    width = 200 if kr.rank() == 0 else 2  # large, and so alone, on one rank only
    variables = [
        tf.Variable(tf.zeros(3)),
        tf.Variable(tf.zeros((width, width))),
        tf.Variable([0.0]),
    ]

    with pytest.raises(kr.MismatchError, match="ranks disagree on number of tensors"):
        reduce_gradients(
            [tf.ones_like(v) for v in variables], variables, Reduction(), scope="other groups"
        )


def test_agree_is_true_only_where_all_ranks_are() -> None:
    assert bool(agree(tf.constant(True), scope="yes"))
    assert not bool(agree(tf.constant(kr.rank() != kr.size() - 1), scope="no"))


class Spy(keras.Model):
    """Keeps the graph in which fit traces its step."""

    def train_step(self, data: Any) -> Any:
        self.graphs.append(tf.compat.v1.get_default_graph())
        return super().train_step(data)


def _ancestors(op: tf.Operation) -> set[tf.Operation]:
    """All that must have run before `op`, for data or for order."""
    found: set[tf.Operation] = set()
    waiting = [op]
    while waiting:
        current = waiting.pop()
        for before in [*(tensor.op for tensor in current.inputs), *current.control_inputs]:
            if before not in found:
                found.add(before)
                waiting.append(before)
    return found


@pytest.mark.parametrize("steps_per_execution, is_scaled", [(1, False), (2, False), (1, True)])
def test_reductions_in_fit_wait_neither_for_each_other_nor_for_backprop(
    steps_per_execution: int, is_scaled: bool
) -> None:
    width = 160  # large enough for a request of its own
    inputs = keras.Input((width,))
    hidden = inputs
    for _ in range(4):
        hidden = keras.layers.Dense(width, activation="tanh", use_bias=False)(hidden)
    model = Spy(inputs, hidden)
    model.graphs = []
    optimizer = keras.optimizers.Adam()
    if is_scaled:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer)
    model.compile(
        kr.DistributedOptimizer(optimizer),
        "mse",
        steps_per_execution=steps_per_execution,
    )
    model.fit(np.ones((8, width)), np.ones((8, width)), batch_size=2, verbose=0)

    ops = model.graphs[-1].get_operations()
    reductions = [op for op in ops if op.type == "KerasRingAllreduce"]
    assert len(reductions) == 4
    before = {op: _ancestors(op) for op in reductions}
    for op in reductions:
        assert not before[op] & set(reductions), f"{op.name} waits for another reduction"
    # Submitted last layer first, and each layer's reduction does without the backprop below it.
    names = [op.get_attr("tensor_name").decode().partition("#")[0] for op in reductions]
    assert [name.rpartition("/")[2] for name in names] == ["3", "2", "1", "0"]
    for later, earlier in itertools.pairwise(reductions):
        source = earlier.inputs[0].op
        assert source not in before[later], f"{later.name} waits for {source.name}"
