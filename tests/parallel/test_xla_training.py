"""`compile(..., jit_compile=True)`: N ranks compute what one process computes without XLA."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

BATCH, STEPS, FEATURES = 6, 4, 5
ATOL = 1e-5


def build() -> Any:
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(8, activation="tanh"),
            keras.layers.Dense(3),
        ]
    )


def build_embedding() -> Any:
    keras.utils.set_random_seed(5)
    return keras.Sequential(
        [
            keras.Input((FEATURES,), dtype="int32"),
            keras.layers.Embedding(7, 4),
            keras.layers.Flatten(),
            keras.layers.Dense(3),
        ]
    )


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Samples by step and rank; small integers, which are indices of an embedding too."""
    random = np.random.default_rng(3)
    x = random.integers(0, 7, (STEPS, kr.size(), BATCH, FEATURES)).astype("int32")
    y = random.normal(size=(STEPS, kr.size(), BATCH, 3)) + np.arange(kr.size())[:, None, None]
    return x, y.astype("float32")


def joint(data: np.ndarray) -> np.ndarray:
    return data.reshape(-1, *data.shape[3:])


def own(data: np.ndarray) -> np.ndarray:
    return data[:, kr.rank()].reshape(-1, *data.shape[3:])


def assert_trains_as_one_process(
    make_optimizer: Callable[[], Any],
    make_model: Callable[[], Any] = build,
    atol: float = ATOL,
    **arguments: Any,
) -> Any:
    """Fit compiled on all ranks, and plainly on the joint batch; return the former's model."""
    x, y = make_data()
    alone, model = make_model(), make_model()
    alone.compile(make_optimizer(), "mse", run_eagerly=True)
    model.compile(
        kr.DistributedOptimizer(make_optimizer()), "mse", **{"jit_compile": True, **arguments}
    )
    alone.fit(joint(x), joint(y), batch_size=BATCH * kr.size(), shuffle=False, verbose=0)
    model.fit(own(x), own(y), batch_size=BATCH, shuffle=False, verbose=0)

    for mine, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, atol=atol, rtol=0)
        np.testing.assert_array_equal(mine, kr.broadcast(mine))
    return model


def skip_above_two_ranks() -> None:
    """Tracing and compiling take seconds on each rank; what is tested is the same on all."""
    if kr.size() > 2:
        pytest.skip("tested on two ranks")


def test_fit_and_evaluate() -> None:
    model = assert_trains_as_one_process(
        lambda: keras.optimizers.Adam(0.05, global_clipnorm=0.5), steps_per_execution=2
    )

    x, y = make_data()
    compiled = model.evaluate(own(x), own(y), batch_size=BATCH, verbose=0)
    model.compile(model.optimizer, "mse", run_eagerly=True)
    plain = model.evaluate(own(x), own(y), batch_size=BATCH, verbose=0)
    np.testing.assert_allclose(compiled, plain, rtol=1e-5)


def test_sparse_gradients() -> None:
    assert_trains_as_one_process(lambda: keras.optimizers.Adam(0.05), build_embedding)


def test_accumulated_gradients() -> None:
    skip_above_two_ranks()
    assert_trains_as_one_process(lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=2))


def test_jit_compile_is_left_to_keras() -> None:
    skip_above_two_ranks()
    assert_trains_as_one_process(lambda: keras.optimizers.SGD(0.1), jit_compile="auto")


def test_overflow_on_one_rank_skips_the_step_on_all() -> None:
    x, y = make_data()
    x = x.astype("float32")
    keras.utils.set_random_seed(5)
    layer = keras.layers.Dense(3, dtype="mixed_float16")
    model = keras.Sequential([keras.Input((FEATURES,)), layer])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), 4.0)
    model.compile(kr.DistributedOptimizer(optimizer), "mse", jit_compile=True)
    before = model.get_weights()

    if kr.rank() == 0:
        x[0] = np.inf
    model.train_on_batch(x[0, kr.rank()], y[0, kr.rank()])
    np.testing.assert_array_equal(model.get_weights()[0], before[0])
    model.train_on_batch(x[1, kr.rank()], y[1, kr.rank()])

    weights = model.get_weights()
    assert not np.array_equal(weights[0], before[0])
    np.testing.assert_array_equal(weights[0], kr.broadcast(weights[0]))


def test_last_batch_is_smaller() -> None:
    """Keras traces anew with an unknown batch size, and so with rows of unknown number."""
    skip_above_two_ranks()
    x, y = make_data()
    models = []
    for arguments in ({"jit_compile": True}, {"run_eagerly": True}):
        models.append(build_embedding())
        models[-1].compile(kr.DistributedOptimizer(keras.optimizers.SGD(0.1)), "mse", **arguments)
        models[-1].fit(own(x), own(y), batch_size=5, shuffle=False, verbose=0)

    for mine, expected in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, atol=ATOL, rtol=0)
        np.testing.assert_array_equal(mine, kr.broadcast(mine))


def test_loop_of_ones_own() -> None:
    skip_above_two_ranks()
    x, y = make_data()
    model, optimizer = build(), kr.DistributedOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build(model.trainable_variables)

    @tf.function(jit_compile=True)
    def step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(x) - y) ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return kr.allreduce(loss)

    losses = [
        float(step(tf.constant(x[i, kr.rank()]), tf.constant(y[i, kr.rank()]))) for i in (0, 0, 0)
    ]

    assert losses[0] > losses[1] > losses[2]
    np.testing.assert_array_equal(losses, kr.allgather([losses])[-1])


def test_ring_strategy() -> None:
    x, y = make_data()
    alone = build()
    alone.compile(keras.optimizers.Adam(0.05), "mse", run_eagerly=True)
    with kr.RingStrategy().scope():
        model = build()
        model.compile(keras.optimizers.Adam(0.05), "mse", metrics=["mae"], jit_compile=True)
    arguments = {"batch_size": BATCH * kr.size(), "verbose": 0}

    alone.fit(joint(x), joint(y), shuffle=False, **arguments)
    model.fit(joint(x), joint(y), shuffle=False, **arguments)

    for mine, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, atol=ATOL, rtol=0)
        np.testing.assert_array_equal(mine, kr.broadcast(mine))
    loss, _ = model.evaluate(joint(x), joint(y), **arguments)
    np.testing.assert_allclose(loss, alone.evaluate(joint(x), joint(y), **arguments), rtol=1e-4)
    predicted = model.predict(joint(x), **arguments)
    np.testing.assert_allclose(predicted, alone.predict(joint(x), **arguments), atol=1e-4)
