"""N ranks on shards compute what one process computes on the joint batch, whatever the optimizer.

The oracle is the plain optimizer on the joint batch, in the same process.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr
from keras_ring import gradients, reducer

FEATURES, OUTPUTS, BATCH, STEPS = 5, 3, 4, 4
ATOL = 1e-5

HAS_ACCUMULATION = (
    "gradient_accumulation_steps" in inspect.signature(keras.optimizers.SGD).parameters
)
KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])


def make_data(steps: int = STEPS) -> tuple[np.ndarray, np.ndarray]:
    """Samples by step and rank; ranks differ so much that local training would be seen."""
    random = np.random.default_rng(7)
    x = random.normal(size=(steps, kr.size(), BATCH, FEATURES))
    x += np.arange(kr.size())[:, None, None] * 0.5
    y = random.normal(size=(steps, kr.size(), BATCH, OUTPUTS))
    return x.astype("float32"), y.astype("float32")


def joint(data: np.ndarray) -> np.ndarray:
    return data.reshape(-1, *data.shape[3:])


def own(data: np.ndarray) -> np.ndarray:
    return data[:, kr.rank()].reshape(-1, *data.shape[3:])


def build_dense(cls: type = keras.Sequential) -> Any:
    # Keras's automatic names differ by rank from here on; requests must not depend on them.
    for _ in range(kr.rank()):
        keras.layers.Dense(1).build((None, 1))
    keras.utils.set_random_seed(5)
    inputs = keras.Input((FEATURES,))
    hidden = keras.layers.Dense(6, activation="tanh", use_bias=False)(inputs)
    outputs = keras.layers.Dense(OUTPUTS)(hidden)
    if cls is keras.Sequential:
        cls = keras.Model
    return cls(inputs, outputs)


def digest(values: list[Any]) -> str:
    arrays = [np.asarray(keras.ops.convert_to_numpy(v)) for v in values]
    return hashlib.sha256(b"".join(a.tobytes() for a in arrays)).hexdigest()


def take_step(model: Any, optimizer: Any, x: Any, y: Any) -> None:
    """One step as `fit` takes it, in a fraction of the time that `fit` takes to prepare."""
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(model(x, training=True) - y))
        loss = optimizer.scale_loss(loss)
    gradients_ = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients_, model.trainable_variables)


def assert_same_training(
    make_optimizer: Callable[[], Any],
    build: Callable[[], Any] = build_dense,
    data: tuple[np.ndarray, np.ndarray] | None = None,
    is_eager: bool = False,
) -> None:
    """Take the same steps both ways; compare weights and the optimizers' state."""
    x, y = data or make_data()
    oracle, model = build(), build()
    initial = oracle.get_weights()
    model.set_weights(initial)
    plain, distributed = make_optimizer(), kr.DistributedOptimizer(make_optimizer())
    step = take_step if is_eager else tf.function(take_step)

    for i in range(len(x)):
        take_step(oracle, plain, joint(x[i : i + 1]), joint(y[i : i + 1]))
        step(model, distributed, own(x[i : i + 1]), own(y[i : i + 1]))

    assert_equal(model, distributed, oracle, plain, initial)


def assert_same_fit(
    make_optimizer: Callable[[], Any],
    build: Callable[[], Any] = build_dense,
    data: tuple[np.ndarray, np.ndarray] | None = None,
    atol: float = ATOL,
    **compile_arguments: Any,
) -> Any:
    """As above, through `compile` and `fit`. Return the distributed model."""
    x, y = data or make_data()
    oracle, model = build(), build()
    initial = oracle.get_weights()
    model.set_weights(initial)
    oracle.compile(make_optimizer(), "mse", run_eagerly=True)
    model.compile(kr.DistributedOptimizer(make_optimizer()), "mse", **compile_arguments)
    oracle.fit(joint(x), joint(y), batch_size=BATCH * kr.size(), shuffle=False, verbose=0)
    model.fit(own(x), own(y), batch_size=BATCH, shuffle=False, verbose=0)

    assert_equal(model, model.optimizer, oracle, oracle.optimizer, initial, atol)
    return model


def assert_equal(
    model: Any, distributed: Any, oracle: Any, plain: Any, initial: list[Any], atol: float = ATOL
) -> None:
    for mine, expected, before in zip(model.weights, oracle.weights, initial, strict=True):
        np.testing.assert_allclose(
            mine.numpy(), expected.numpy(), rtol=0, atol=atol, err_msg=mine.path
        )
        assert np.abs(mine.numpy() - before).max() > 5 * atol
    own_parts = {v.path for v in reducer.gradient_accumulators(distributed)}
    for mine, expected in zip(distributed.variables, plain.variables, strict=True):
        # What is accumulated is each rank's own part until the next update.
        value = kr.allreduce(mine.numpy()) if mine.path in own_parts else mine.numpy()
        np.testing.assert_allclose(value, expected.numpy(), rtol=atol, atol=atol, err_msg=mine.path)
    state = [v for v in distributed.variables if v.path not in own_parts]
    digests = kr.allgather_object(digest([*model.weights, *state]))
    assert len(set(digests)) == 1


def make_multi() -> Any:
    return keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(
            keras.optimizers.SGD(0.05), {".*bias": keras.optimizers.Adam(0.05)}
        )
    )


SPECIAL = {
    "Adadelta": lambda: keras.optimizers.Adadelta(5.0),
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.05)),
    "MultiOptimizer": make_multi,
    "SGD": lambda: keras.optimizers.SGD(0.05, momentum=0.9, nesterov=True),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.05, momentum=0.5, centered=True),
}
# Every class that this Keras has: a new one is tested without being listed.
OPTIMIZERS = sorted(
    name
    for name, cls in vars(keras.optimizers).items()
    if inspect.isclass(cls)
    and issubclass(cls, keras.optimizers.Optimizer)
    and cls is not keras.optimizers.Optimizer
)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_on_shards_equals_joint_batch(name: str) -> None:
    if name == "Muon" and (3, 10) <= KERAS < (3, 13):
        pytest.skip("Muon of this Keras fails without keras_ring, too")
    make = SPECIAL.get(name, lambda: getattr(keras.optimizers, name)(learning_rate=0.05))

    assert_same_training(make)


OPTIONS: dict[str, dict[str, Any]] = {
    "clipnorm": {"clipnorm": 0.1},
    "global_clipnorm": {"global_clipnorm": 0.1},
    "clipvalue": {"clipvalue": 0.02},
    "weight_decay": {"weight_decay": 0.1},
    "ema": {"use_ema": True, "ema_momentum": 0.7, "ema_overwrite_frequency": 2},
    "loss_scale_factor": {"loss_scale_factor": 16.0},
}
if HAS_ACCUMULATION:
    OPTIONS["accumulation"] = {"gradient_accumulation_steps": 2}
    OPTIONS["accumulation_clip"] = {"gradient_accumulation_steps": 2, "global_clipnorm": 0.1}
    OPTIONS["accumulation_decay_ema"] = {
        "gradient_accumulation_steps": 2,
        "weight_decay": 0.1,
        "use_ema": True,
    }


@pytest.mark.parametrize("option", OPTIONS)
def test_option_on_shards_equals_joint_batch(option: str) -> None:
    assert_same_training(lambda: keras.optimizers.SGD(0.2, momentum=0.9, **OPTIONS[option]))


@pytest.mark.skipif(KERAS < (3, 5), reason="no variables that are overwritten")
@pytest.mark.parametrize("accumulation", [None, 2])
def test_variable_that_is_overwritten_gets_the_largest_value(accumulation: int | None) -> None:
    amax, weight = keras.Variable(0.5), keras.Variable(0.0)
    amax.overwrite_with_gradient = True
    optimizer = kr.DistributedOptimizer(
        keras.optimizers.SGD(1.0, gradient_accumulation_steps=accumulation)
    )

    @tf.function
    def step(value: tf.Tensor) -> None:
        optimizer.apply([value, value], [amax, weight])

    optimizer.build([amax, weight])
    step(tf.constant(kr.rank() + 10.0))
    assert float(amax.numpy()) == (kr.size() + 9.0 if accumulation is None else 0.5)
    step(tf.constant(kr.rank() + 1.0))

    # Keras joins the values of a window by their maximum, and gradients by their mean.
    assert float(amax.numpy()) == kr.size() + (0.0 if accumulation is None else 9.0)
    mean = (kr.size() - 1) / 2
    expected = -(2 * mean + 11.0) / (1 if accumulation is None else 2)
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6)


@pytest.mark.skipif(not HAS_ACCUMULATION or KERAS == (3, 0), reason="Keras 3.0 clips each batch")
@pytest.mark.parametrize("is_eager", [False, True])
def test_accumulation_reduces_once_for_each_update(
    is_eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = []
    reduce = gradients.reduce_gradients

    def spy(*arguments: Any, **keywords: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        where.append("eager" if tf.executing_eagerly() else type(graph).__name__)
        return reduce(*arguments, **keywords)

    monkeypatch.setattr(gradients, "reduce_gradients", spy)

    assert_same_training(
        lambda: keras.optimizers.SGD(0.2, gradient_accumulation_steps=2), is_eager=is_eager
    )

    if is_eager:
        assert where == ["eager"] * (STEPS // 2)
    else:
        # Within the branch that Keras takes at the end of a window, and nowhere else.
        assert set(where) == {"CondBranchFuncGraph"}


@pytest.mark.skipif(not HAS_ACCUMULATION, reason="no accumulation in this Keras")
def test_accumulation_with_incomplete_window_equals_joint_batch() -> None:
    assert_same_training(
        lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=3), data=make_data(steps=5)
    )


# Older Keras repeats a step when the last execution is not complete.
@pytest.mark.parametrize(
    "arguments",
    [{}, {"run_eagerly": True}, {"steps_per_execution": 3 if KERAS >= (3, 10) else 2}],
    ids=["graph", "eager", "steps_per_execution"],
)
def test_fit_equals_joint_batch(arguments: dict[str, Any]) -> None:
    assert_same_fit(lambda: keras.optimizers.Adam(0.05, clipnorm=0.1), **arguments)


def test_train_on_batch_equals_joint_batch() -> None:
    x, y = make_data(steps=2)
    oracle, model = build_dense(), build_dense()
    oracle.compile("sgd", "mse", run_eagerly=True)
    model.compile(kr.DistributedOptimizer("sgd"), "mse")

    for step in range(2):
        oracle.train_on_batch(joint(x[step : step + 1]), joint(y[step : step + 1]))
        model.train_on_batch(own(x[step : step + 1]), own(y[step : step + 1]))

    for mine, expected in zip(model.get_weights(), oracle.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, atol=ATOL)


class CustomStep(keras.Model):
    """Takes its step by one of the optimizer's two methods."""

    entry = "apply"

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y))
        values = tape.gradient(loss, self.trainable_variables)
        if self.entry == "apply":
            self.optimizer.apply(values, self.trainable_variables)
        else:
            self.optimizer.apply_gradients(zip(values, self.trainable_variables, strict=True))
        return {"loss": loss}


@pytest.mark.parametrize("entry", ["apply", "apply_gradients"])
def test_custom_train_step_equals_joint_batch(entry: str) -> None:
    def build() -> Any:
        model = build_dense(CustomStep)
        model.entry = entry
        return model

    assert_same_fit(lambda: keras.optimizers.Adam(0.05), build)


class Centered(keras.optimizers.SGD):
    """A user's optimizer that changes gradients before the step."""

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        centered = [g - tf.reduce_max(g) for g in grads]
        super().apply(centered, trainable_variables)


def test_subclass_with_its_own_apply_sees_reduced_gradients() -> None:
    assert_same_training(lambda: Centered(0.02))


@pytest.mark.skipif(not hasattr(keras.optimizers, "MultiOptimizer"), reason="newer Keras")
@pytest.mark.parametrize("is_scaled", [False, True])
def test_multi_optimizer_with_optimizers_created_when_it_is_built(is_scaled: bool) -> None:
    def make() -> Any:
        made: dict[bool, Any] = {}

        def select(variable: Any) -> Any:
            is_bias = "bias" in variable.path
            kind = keras.optimizers.Adam if is_bias else keras.optimizers.SGD
            return made.setdefault(is_bias, kind(0.05))

        multi = keras.optimizers.MultiOptimizer(select)
        return keras.optimizers.LossScaleOptimizer(multi) if is_scaled else multi

    assert_same_training(make)


@pytest.fixture
def _mixed_float16() -> Iterator[None]:
    keras.mixed_precision.set_global_policy("mixed_float16")
    yield
    keras.mixed_precision.set_global_policy("float32")


@pytest.mark.usefixtures("_mixed_float16")
@pytest.mark.parametrize("accumulation", [None, 2] if HAS_ACCUMULATION else [None])
def test_overflow_on_one_rank_skips_the_step_on_all(
    accumulation: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, y = make_data(steps=4)
    # As float16, infinite; on the last rank only, in the third step.
    x[2, -1, 0, 0] = 1e30
    if accumulation is None:
        # Reduced gradients decide: equal on all ranks, so nothing is left to agree on.
        monkeypatch.setattr(gradients, "agree", None)
    extra = {"gradient_accumulation_steps": accumulation} if accumulation else {}

    model = assert_same_fit(
        lambda: keras.optimizers.SGD(0.2, momentum=0.9, clipnorm=0.5, **extra),
        data=(x, y),
        atol=3e-3,
    )

    scaled = model.optimizer
    assert isinstance(scaled, keras.optimizers.LossScaleOptimizer)
    assert float(scaled.dynamic_scale.numpy()) == scaled.initial_scale / 2
    inner = scaled.inner_optimizer
    assert int(getattr(inner, "_iterations", inner.iterations).numpy()) == 3


def build_embedding() -> Any:
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            keras.layers.Embedding(11, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(OUTPUTS),
        ]
    )


SPARSE: dict[str, Callable[[], Any]] = {
    "sgd": lambda: keras.optimizers.SGD(0.2, momentum=0.9),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "clipvalue": lambda: keras.optimizers.Adam(0.05, clipvalue=0.01),
    "loss_scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.2)),
}
if HAS_ACCUMULATION:
    SPARSE["accumulation"] = lambda: keras.optimizers.SGD(0.2, gradient_accumulation_steps=2)


@pytest.mark.parametrize("case", SPARSE)
def test_embedding_with_repeated_and_missing_ids_equals_joint_batch(case: str) -> None:
    random = np.random.default_rng(3)
    ids = random.integers(0, 3, size=(STEPS, kr.size(), BATCH, 3))
    ids += (np.arange(kr.size()) * 2)[:, None, None] % 8
    _, y = make_data()

    assert_same_training(SPARSE[case], build_embedding, (ids.astype("int32"), y))
