"""Tapes whose gradients are all ranks', and layers that are each rank's own."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

ROWS = 4


def batch(rank: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(rank)
    return rng.normal(size=(ROWS, 3)).astype("float32"), rng.normal(size=(ROWS, 2)).astype(
        "float32"
    )


def joint_batch() -> tuple[np.ndarray, np.ndarray]:
    xs, ys = zip(*map(batch, range(kr.size())), strict=True)
    return np.concatenate(xs), np.concatenate(ys)


def loss_of(w: Any, b: Any, x: Any, y: Any) -> Any:
    return tf.reduce_mean((x @ w + b - y) ** 2)


def variables() -> tuple[tf.Variable, keras.Variable]:
    return tf.Variable(np.ones((3, 2), "float32")), keras.Variable(np.zeros(2, "float32"))


def joint_gradients() -> list[np.ndarray]:
    w, b = variables()
    with tf.GradientTape() as tape:
        loss = loss_of(w, b, *joint_batch())
    return [g.numpy() for g in tape.gradient(loss, [w, b])]


@pytest.mark.parametrize("is_graph", [False, True])
@pytest.mark.parametrize("groups", [None, 1, 2])
def test_gradients_are_those_of_the_joint_batch(is_graph: bool, groups: int | None) -> None:
    w, b = variables()

    def step(x: Any, y: Any) -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(w, b, x, y)
        return kr.DistributedGradientTape(tape, groups=groups).gradient(loss, {"w": w, "b": [b]})

    result = (tf.function(step) if is_graph else step)(*batch(kr.rank()))

    expected_w, expected_b = joint_gradients()
    np.testing.assert_allclose(result["w"], expected_w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result["b"][0], expected_b, rtol=1e-5, atol=1e-6)


def test_a_single_source_and_a_sum_and_the_tapes_own_methods() -> None:
    x = tf.constant([float(kr.rank() + 1), 2.0])
    with kr.DistributedGradientTape(tf.GradientTape(persistent=True), op="sum") as tape:
        tape.watch(x)
        y = x * x
    np.testing.assert_allclose(
        tape.gradient(y, x), [kr.size() * (kr.size() + 1), 4.0 * kr.size()], rtol=1e-6
    )
    np.testing.assert_allclose(tape.jacobian(y, x), np.diag(2 * x))  # this rank's alone


def test_unconnected_sources_give_none_or_zeros() -> None:
    used, unused = tf.Variable([1.0]), tf.Variable([[2.0]])
    with tf.GradientTape(persistent=True) as plain:
        loss = used * 3.0
    tape = kr.DistributedGradientTape(plain)
    assert tape.gradient(loss, [used, unused])[1] is None
    zeros = tape.gradient(loss, [used, unused], unconnected_gradients="zero")[1]
    np.testing.assert_array_equal(zeros, [[0.0]])


@pytest.mark.parametrize("as_dense", [False, True])
def test_rows_of_an_embedding(as_dense: bool) -> None:
    table = tf.Variable(np.zeros((kr.size() + 1, 2), "float32"))
    with tf.GradientTape() as plain:
        loss = tf.reduce_sum(tf.gather(table, [0, kr.rank() + 1]))
    tape = kr.DistributedGradientTape(plain, sparse_as_dense=as_dense)

    gradient = tape.gradient(loss, table)

    assert isinstance(gradient, tf.IndexedSlices) != as_dense
    expected = np.full((kr.size() + 1, 2), 1 / kr.size())
    expected[0] = 1.0
    np.testing.assert_allclose(tf.convert_to_tensor(gradient), expected, rtol=1e-6)


@pytest.mark.parametrize("is_graph", [False, True])
def test_gradients_of_the_target_are_each_ranks_own(is_graph: bool) -> None:
    w = tf.Variable([1.0, 2.0])

    def step(weights: tf.Tensor) -> Any:
        with tf.GradientTape() as tape:
            y = w * w
        return kr.DistributedGradientTape(tape).gradient(y, w, output_gradients=weights)

    result = (tf.function(step) if is_graph else step)(tf.constant([float(kr.rank()), 1.0]))

    np.testing.assert_allclose(result, [kr.size() - 1.0, 4.0], rtol=1e-6)


def test_a_local_variable_is_known_by_keras_and_by_tensorflow() -> None:
    """`watched_variables` gives TensorFlow's variables, layers have those of Keras."""
    layer = keras.layers.Dense(1, use_bias=False)
    layer.build((None, 1))
    own = kr.rank() + 1.0
    with tf.GradientTape(persistent=True) as tape:
        loss = tf.reduce_sum(layer(tf.constant([[own]])))

    by_layer = kr.PartialDistributedGradientTape(tape, local_layers=layer)
    by_value = kr.DistributedGradientTape(tape)
    by_value.register_local_source(layer.kernel.value)

    for wrapped in (by_layer, by_value):
        for sources in (tape.watched_variables(), layer.trainable_variables):
            [gradient] = wrapped.gradient(loss, sources)
            np.testing.assert_allclose(gradient, [[own / kr.size()]], rtol=1e-6)


@pytest.mark.parametrize("scales", [False, True])
def test_local_layers_keep_their_own_gradients(scales: bool) -> None:
    shared, own = keras.layers.Dense(2, use_bias=False), keras.layers.Dense(2, use_bias=False)
    shared.build((None, 3))
    own.build((None, 2))
    kr.broadcast_variables([shared.kernel])
    x, y = batch(kr.rank())

    def gradients(wrap: Any) -> list[np.ndarray]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((own(shared(x)) - y) ** 2)
        return [g.numpy() for g in wrap(tape).gradient(loss, [shared.kernel, own.kernel])]

    plain = gradients(lambda tape: tape)
    result = gradients(
        lambda tape: kr.PartialDistributedGradientTape(
            tape, local_layers=own, scale_local_gradients=scales
        )
    )

    def registered(tape: Any) -> Any:
        wrapped = kr.DistributedGradientTape(tape)
        wrapped.register_local_source(own.kernel)
        return wrapped

    mean = kr.allreduce(plain[0]).numpy()
    np.testing.assert_allclose(result[0], mean, rtol=1e-5)
    np.testing.assert_allclose(result[1], plain[1] / (kr.size() if scales else 1), rtol=1e-6)
    np.testing.assert_allclose(gradients(registered)[1], plain[1] / kr.size(), rtol=1e-6)


def test_partial_optimizer_trains_local_layers_alone_and_broadcasts_the_others() -> None:
    """Each rank's local layer has a shape of its own."""
    width = 2 + kr.rank()
    keras.utils.set_random_seed(kr.rank())
    local = keras.layers.Dense(width, name="own")
    model = keras.Sequential(
        [keras.Input((3,)), keras.layers.Dense(4), local, keras.layers.Lambda(lambda t: t[:, :2])]
    )
    local_before = [v.numpy() for v in local.variables]
    optimizer = kr.PartialDistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.9), local_layers=[local]
    )
    model.compile(optimizer, "mse")

    model.fit(
        *batch(kr.rank()), epochs=2, verbose=0, callbacks=[kr.callbacks.BroadcastInitialWeights()]
    )

    shared = [v.numpy() for v in model.layers[0].variables]
    for theirs in kr.allgather_object(shared):
        for ours, other in zip(shared, theirs, strict=True):
            np.testing.assert_array_equal(ours, other)
    assert local.kernel.shape == (4, width)
    assert not np.allclose(local.kernel, local_before[0])


def test_a_process_set_reduces_among_its_ranks() -> None:
    process_set = kr.add_process_set([0])
    if process_set.included():
        x = tf.Variable(3.0)
        with tf.GradientTape() as tape:
            y = x * x
        assert kr.DistributedGradientTape(tape, process_set=process_set).gradient(y, x) == 6.0
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
        model.compile(kr.DistributedOptimizer("sgd", process_set=process_set), "mse")
        model.fit(*batch(0), verbose=0)
    kr.remove_process_set(process_set)


def test_what_is_no_tape_or_layer_is_refused() -> None:
    with pytest.raises(kr.ConfigError, match=r"expected a tf\.GradientTape, but got int"):
        kr.DistributedGradientTape(3)
    with pytest.raises(kr.ConfigError, match="distributed already"):
        kr.DistributedGradientTape(kr.DistributedGradientTape(tf.GradientTape()))
    with pytest.raises(kr.ConfigError, match="op is 'max'"):
        kr.DistributedGradientTape(tf.GradientTape(), op="max")  # type: ignore[arg-type]
    with pytest.raises(kr.ConfigError, match="groups is 0"):
        kr.DistributedOptimizer("sgd", groups=0)
    with pytest.raises(kr.ConfigError, match="local_layers has an object of str"):
        kr.PartialDistributedOptimizer("sgd", local_layers=["dense"])
