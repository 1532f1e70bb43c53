"""What cannot be right in a RingStrategy is one sentence, on every rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import pytest

import keras_ring as kr

sys.path.insert(0, str(Path(__file__).parent))
from strategy_oracle import numbers

# One process alone has no other rank to differ from.
differs = pytest.mark.usefixtures("_other_ranks")
FIT = {"batch_size": 4, "verbose": 0}


@pytest.fixture(name="_other_ranks")
def several_ranks(_world: None) -> None:
    if kr.size() == 1:
        pytest.skip("needs another rank")


def make(units: int = 1) -> Any:
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(units)])


def compiled(loss: Any = "mse", **options: Any) -> Any:
    with kr.RingStrategy().scope():
        model = make()
        model.compile("sgd", loss, run_eagerly=True, **options)
    return model


def data(rows: int = 8) -> tuple[Any, Any]:
    return numbers(rows, 3), numbers(rows, 1, seed=1)


@differs
def test_model_built_outside_of_the_scope():
    model = make()
    with (
        kr.RingStrategy().scope(),
        pytest.raises(kr.ConfigError, match="built outside of the scope.*Build it within"),
    ):
        model.compile("sgd", "mse")


@differs
def test_metric_made_outside_of_the_scope():
    metric = keras.metrics.MeanAbsoluteError(name="mine")
    with pytest.raises(kr.ConfigError, match="'mine/total' was made outside.*within the scope"):
        compiled(metrics=[metric]).fit(*data(), **FIT)


@differs
@pytest.mark.parametrize("reduction", [None, "none"])
def test_loss_that_is_not_reduced(reduction):
    model = compiled(keras.losses.MeanSquaredError(reduction=reduction))
    with pytest.raises(kr.ConfigError, match=r"shape \(\d,\).*reduction='sum_over_batch_size'"):
        model.fit(*data(), **FIT)


@differs
def test_models_of_other_shapes():
    with (
        kr.RingStrategy().scope(),
        pytest.raises(kr.ConfigError, match=r"rank 0 has .*\[3, 1\].* rank 1 has .*\[3, 2\]"),
    ):
        make(units=1 + kr.rank())


@differs
def test_models_of_other_lengths():
    def train() -> None:
        with kr.RingStrategy().scope():
            model = make()
            if kr.rank() == 0:
                model.add(keras.layers.Dense(1))
            model.compile("sgd", "mse")
        model.fit(*data(), **FIT)

    what = r"rank 0 has \('kernel', \[1, 1\].*rank 1 has \('iteration'.*Build the same model"
    with pytest.raises(kr.ConfigError, match=what):
        train()


@differs
def test_one_rank_alone_validates():
    validation = {"validation_data": data()} if kr.rank() == 0 else {}
    with pytest.raises(kr.ConfigError, match="rank 0 begins fit, evaluate.* rank 1 ends an epoch"):
        compiled().fit(*data(), **FIT, **validation)


@differs
def test_other_numbers_of_epochs_steps_and_callbacks():
    model, sharing = compiled(), [kr.callbacks.MetricAverage()]
    with pytest.raises(
        kr.ConfigError, match=r"rank 0 has .*'epochs': 1.* rank 1 has .*'epochs': 2"
    ):
        model.fit(*data(), **FIT, epochs=1 + kr.rank())
    with pytest.raises(kr.ConfigError, match=r"'steps_per_epoch': 1.*'steps_per_epoch': 2"):
        model.fit(*data(), **FIT, steps_per_epoch=1 + kr.rank())
    with pytest.raises(kr.ConfigError, match=r"MetricAverage.* rank 1 has .*\[\]"):
        model.fit(*data(), **FIT, callbacks=sharing if kr.rank() == 0 else [])
    model.fit(*data(), **FIT)


def test_predictions_that_cannot_be_put_together():
    if kr.size() == 1:
        pytest.skip("one rank puts nothing together")
    with kr.RingStrategy().scope():
        model = keras.Sequential(
            [keras.layers.Lambda(lambda x: keras.tree.map_structure(str_of, x))]
        )
    with pytest.raises(kr.ConfigError, match="predict cannot put together .*string"):
        model.predict(data()[0], verbose=0)


def str_of(x: Any) -> Any:
    import tensorflow as tf

    return tf.strings.as_string(x)
