"""Every optimizer of Keras in a RingStrategy's scope takes the step of one process."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_ring as kr

sys.path.insert(0, str(Path(__file__).parent))
from strategy_oracle import assert_alike_on_all_ranks, assert_same_state, both, numbers

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "SGD": lambda o: o.SGD(0.1, momentum=0.9, nesterov=True, clipvalue=0.01),
    "RMSprop": lambda o: o.RMSprop(0.01, centered=True, clipnorm=0.05),
    "Adam": lambda o: o.Adam(0.01, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda o: o.AdamW(0.01, use_ema=True, ema_overwrite_frequency=2),
    "Adadelta": lambda o: o.Adadelta(1.0, global_clipnorm=0.05),
    "Adagrad": lambda o: o.Adagrad(0.1),
    "Adamax": lambda o: o.Adamax(0.01),
    "Nadam": lambda o: o.Nadam(0.01),
    "Ftrl": lambda o: o.Ftrl(0.1, l1_regularization_strength=0.01),
    "Lion": lambda o: o.Lion(0.01),
    "Lamb": lambda o: o.Lamb(0.01),
    "Adafactor": lambda o: o.Adafactor(0.01),
    "Muon": lambda o: o.Muon(0.01),
    "accumulating": lambda o: o.Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.05),
    "scaling": lambda o: o.LossScaleOptimizer(o.SGD(0.1, clipnorm=0.05), initial_scale=4.0),
    "schedule": lambda o: o.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_takes_the_step_of_one_process(name):
    if name[0].isupper() and not hasattr(keras.optimizers, name):
        pytest.skip(f"Keras {keras.__version__} has no {name}")

    def make() -> Any:
        model = keras.Sequential(
            [
                keras.Input((4,), dtype="int32"),
                keras.layers.Embedding(7, 3),  # gradients of some rows
                keras.layers.Flatten(),
                keras.layers.Dense(2, activation="tanh", kernel_regularizer="l2"),
            ]
        )
        model.compile(OPTIMIZERS[name](keras.optimizers), "mse", run_eagerly=True)
        return model

    plain, joint = both(make)
    kernel = joint.get_weights()[1]
    # Rank 0 has one row more than the others, and each rank meets other words.
    rows = np.arange(2 * kr.size() + 1)
    owners = np.maximum(rows - 1, 0) // 2
    x = (np.arange(len(rows) * 4).reshape(-1, 4) * 5 // 3 % 7).astype("int32")
    y = numbers(len(rows), 2, seed=1)
    for _ in range(4):
        plain.train_on_batch(x, y)
        joint.train_on_batch(x[owners == kr.rank()], y[owners == kr.rank()])
    assert_same_state(plain, joint)
    assert not np.allclose(kernel, joint.get_weights()[1])


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_mixed_precision_with_accumulation_and_an_overflow_on_one_rank(policy):
    def make() -> Any:
        before = keras.mixed_precision.dtype_policy()
        keras.mixed_precision.set_dtype_policy(policy)
        try:
            model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        finally:
            keras.mixed_precision.set_dtype_policy(before)
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)
        if policy == "mixed_float16":
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8.0)
        model.compile(optimizer, "mse")
        return model

    # Numbers of few bits, so that 16 bits lose nothing.
    plain, joint = both(make)
    for model in (plain, joint):
        model.set_weights([np.array([[1], [-2], [0.5]], "float32"), np.zeros(1, "float32")])
    x = (np.arange(12 * kr.size()).reshape(-1, 3) % 5 - 2).astype("float32")
    y = (np.arange(4 * kr.size())[:, None] % 3).astype("float32")
    own = slice(4 * kr.rank(), 4 * kr.rank() + 4)
    for step in range(5):
        if step == 2 and policy == "mixed_float16":
            y_step = y.copy()
            y_step[-1] = 6e4  # times the scale: beyond float16, on the last rank alone
            before = [w.copy() for w in joint.get_weights()]
            joint.train_on_batch(x[own], y_step[own])
            plain.train_on_batch(x, y_step)
            assert_alike_on_all_ranks(joint.get_weights())
            for now, then in zip(joint.get_weights(), before, strict=True):
                np.testing.assert_array_equal(now, then)
        plain.train_on_batch(x, y)
        joint.train_on_batch(x[own], y[own])
    assert_same_state(plain, joint, atol=4e-3)
