"""What DistributedOptimizer takes, keeps and refuses, and when it says that nothing was reduced."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr
from keras_ring import reducer

KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])
HAS_ACCUMULATION = (
    "gradient_accumulation_steps" in inspect.signature(keras.optimizers.SGD).parameters
)


def build(cls: type = keras.Model) -> Any:
    inputs = keras.Input((3,))
    return cls(inputs, keras.layers.Dense(1)(inputs))


def fit(model: Any, callbacks: list[Any]) -> None:
    model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0, callbacks=callbacks)


class Bypass(keras.Model):
    """Updates its weights past the optimizer's `apply`."""

    def train_step(self, data: Any) -> dict[str, Any]:
        for variable in self.trainable_variables:
            self.optimizer.update_step(
                tf.ones_like(variable), variable.value, self.optimizer.learning_rate
            )
        return {"loss": tf.constant(0.0)}


def test_step_that_bypasses_the_optimizer_raises() -> None:
    model = build(Bypass)
    model.compile(kr.DistributedOptimizer("sgd"), run_eagerly=True)
    model.optimizer.build(model.trainable_variables)

    with pytest.raises(kr.ConfigError, match="reduced no gradient.*optimizer.apply"):
        fit(model, [kr.callbacks.BroadcastInitialWeights()])


def test_optimizer_distributed_after_training_raises_instead_of_not_reducing() -> None:
    model = build()
    model.compile("sgd", "mse")
    fit(model, [])
    kr.DistributedOptimizer(model.optimizer)

    with pytest.raises(kr.ConfigError, match="call model.compile again"):
        fit(model, [kr.callbacks.BroadcastInitialWeights()])


@pytest.mark.skipif(not HAS_ACCUMULATION or KERAS == (3, 0), reason="no hook in this Keras")
def test_accumulation_that_never_reaches_the_hook_raises() -> None:
    class Skips(keras.optimizers.SGD):
        def _backend_apply_gradients(self, grads: Any, trainable_variables: Any) -> None:
            self._backend_update_step(grads, trainable_variables, self.learning_rate)

    optimizer = kr.DistributedOptimizer(Skips(0.1, gradient_accumulation_steps=2))
    variable = keras.Variable(1.0)
    optimizer.apply([tf.constant(1.0)], [variable])

    with pytest.raises(kr.ConfigError, match="applied 2 steps and reduced no gradient"):
        optimizer.apply([tf.constant(1.0)], [variable])


def test_one_function_may_use_an_optimizer_twice_and_two_optimizers() -> None:
    rank, size = kr.rank(), kr.size()
    first = kr.DistributedOptimizer(keras.optimizers.SGD(1.0))
    second = kr.DistributedOptimizer(keras.optimizers.SGD(1.0), name="critic")
    a, b = keras.Variable([0.0, 0.0]), keras.Variable([0.0])

    @tf.function
    def step(value: tf.Tensor) -> None:
        first.apply([tf.stack([value, value])], [a])
        first.apply([tf.stack([value, -value])], [a])
        second.apply([value[None]], [b])

    step(tf.constant(float(rank + 1)))

    mean = sum(range(1, size + 1)) / size
    np.testing.assert_allclose(a.numpy(), [-2 * mean, 0.0], atol=1e-6)
    np.testing.assert_allclose(b.numpy(), [-mean], atol=1e-6)


def test_sum_adds_gradients_of_all_ranks() -> None:
    optimizer = kr.DistributedOptimizer(keras.optimizers.SGD(1.0), op="sum")
    variable = keras.Variable([0.0])

    optimizer.apply([tf.constant([float(kr.rank() + 1)])], [variable])

    np.testing.assert_allclose(variable.numpy(), [-sum(range(1, kr.size() + 1))])


def test_missing_gradients_stay_missing() -> None:
    used, unused = keras.Variable([0.0], name="used"), keras.Variable([0.0], name="unused")
    optimizer = kr.DistributedOptimizer(keras.optimizers.SGD(1.0))

    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([None, tf.constant([float(kr.rank())])], [unused, used])

    np.testing.assert_allclose(used.numpy(), [-(kr.size() - 1) / 2])
    assert unused.numpy() == [0.0]


def test_used_optimizer_keeps_its_state_and_class() -> None:
    model = build()
    optimizer = keras.optimizers.Adam(0.05)
    model.compile(optimizer, "mse", run_eagerly=True)
    fit(model, [])
    before = [v.numpy() for v in optimizer.variables]
    config = optimizer.get_config()

    wrapped = kr.DistributedOptimizer(kr.DistributedOptimizer(optimizer))

    assert wrapped is optimizer
    assert type(wrapped) is keras.optimizers.Adam
    for mine, value in zip(wrapped.variables, before, strict=True):
        np.testing.assert_array_equal(mine.numpy(), value)
    assert wrapped.get_config() == config
    assert keras.optimizers.serialize(wrapped)["registered_name"] in (None, "Adam")
    assert keras.optimizers.Adam.from_config(wrapped.get_config()).get_config() == config


@pytest.mark.parametrize(
    "given", ["adam", {"class_name": "Adam", "config": {"learning_rate": 0.25}}]
)
def test_name_or_config_gives_a_distributed_optimizer(given: Any) -> None:
    optimizer = kr.DistributedOptimizer(given)

    assert type(optimizer) is keras.optimizers.Adam
    assert reducer.is_distributed(optimizer)


@pytest.mark.parametrize(
    "given, message",
    [
        (
            tf.compat.v1.train.AdamOptimizer(),
            r"got an object of tensorflow\..*AdamOptimizer.*hooks",
        ),
        (keras.optimizers.Adam, r"got the class keras\..*Adam. Create it first"),
        (None, r"got an object of builtins.NoneType"),
    ],
)
def test_what_is_no_keras_3_optimizer_is_refused(given: Any, message: str) -> None:
    with pytest.raises(kr.ConfigError, match=message):
        kr.DistributedOptimizer(given)


def test_unknown_or_changed_op_is_refused() -> None:
    with pytest.raises(kr.ConfigError, match="op is 'max'; expected one of 'mean', 'sum'"):
        kr.DistributedOptimizer("sgd", op="max")
    optimizer = kr.DistributedOptimizer("sgd")
    with pytest.raises(kr.ConfigError, match="op='mean' already, and op='sum'"):
        kr.DistributedOptimizer(optimizer, op="sum")


def test_strategy_with_several_replicas_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = tf.distribute.get_strategy()
    monkeypatch.setattr(type(strategy), "num_replicas_in_sync", property(lambda self: 2))
    optimizer = kr.DistributedOptimizer("sgd")

    with pytest.raises(kr.ConfigError, match="with 2 replicas.*expects one replica a rank"):
        optimizer.apply([tf.constant(1.0)], [keras.Variable(1.0)])
