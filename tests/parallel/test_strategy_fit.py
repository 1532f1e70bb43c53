"""fit, evaluate and predict in a RingStrategy's scope are those of one process on all the data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

sys.path.insert(0, str(Path(__file__).parent))
from strategy_oracle import (
    assert_alike_on_all_ranks,
    assert_close,
    assert_same_state,
    assert_same_training,
    both,
    numbers,
    same_seed,
)

# Three batches of 12, which 1 to 4 ranks divide, one of which they do not, and a last row that
# leaves all ranks but one with nothing.
ROWS, BATCH = 49, 12


def dense(*layers: Any) -> Any:
    return keras.Sequential(
        [
            keras.Input((5,)),
            keras.layers.Dense(8, activation="tanh", kernel_regularizer="l2"),
            *layers,
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )


def classes(rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
    return numbers(rows, 5), (numbers(rows, 1, seed=1) > 0).astype("float32")


def test_batches_that_do_not_divide_clipping_regularisers_and_metrics():
    def make() -> Any:
        model = dense()
        model.compile(
            keras.optimizers.AdamW(0.01, global_clipnorm=0.05, weight_decay=0.1),
            "binary_crossentropy",
            metrics=[
                "accuracy",
                keras.metrics.AUC(name="auc"),
                keras.metrics.TruePositives(name="hits"),
            ],
            weighted_metrics=["mae"],
        )
        return model

    x, y = classes()
    weights = np.linspace(0.1, 2, ROWS).astype("float32")
    assert_same_training(make, (x, y), sample_weight=weights, batch_size=20, validation_split=0.2)


def test_steps_in_a_graph_and_a_synchronized_batch_normalization():
    def make() -> Any:
        model = dense(keras.layers.BatchNormalization(synchronized=True))
        model.compile(
            keras.optimizers.SGD(0.1, momentum=0.9, clipnorm=0.1, use_ema=True),
            "mse",
            steps_per_execution=3,
        )
        return model

    # The statistics are E[x^2] - E[x]^2 of all rows, which costs a digit.
    x, y = classes(41)
    assert_same_training(make, (x, y), class_weight={0: 0.5, 1: 2.0}, atol=3e-5)


def test_dict_inputs_outputs_masks_and_embeddings():
    def make() -> Any:
        words = keras.Input((6,), dtype="int32", name="words")
        number = keras.Input((3,), name="number")
        embedded = keras.layers.Embedding(9, 4, mask_zero=True)(words)
        tags = keras.layers.Dense(3, name="tags")(embedded)
        pooled = keras.layers.GlobalAveragePooling1D()(embedded)
        joined = keras.layers.Concatenate()([pooled, number])
        score = keras.layers.Dense(1, name="score")(joined)
        model = keras.Model({"words": words, "number": number}, {"tags": tags, "score": score})
        model.compile(
            keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, global_clipnorm=0.5),
            {
                "tags": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
                "score": keras.losses.MeanSquaredError(reduction="sum"),
            },
            loss_weights={"tags": 0.5, "score": 0.02},
            metrics={"tags": ["accuracy"], "score": ["mae"]},
        )
        return model

    random = np.random.default_rng(3)
    # Ranks have other numbers of words, so the mean over words is not that of the ranks' means.
    words = random.integers(1, 9, (ROWS, 6)) * (np.arange(6) <= np.arange(ROWS)[:, None] % 7)
    x = {"words": words.astype("int32"), "number": numbers(ROWS, 3)}
    y = {"tags": random.integers(0, 3, (ROWS, 6)), "score": numbers(ROWS, 1, seed=4)}
    # What Keras logs of several losses weighs each batch alike in a graph, and each row eagerly.
    assert_same_training(make, (x, y), eagerly=False)


class OwnStep(keras.Model):
    """A train_step as users write it: a loss by hand, logs that are no metrics."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = keras.layers.Dense(4, activation="tanh")
        self.out = keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        hidden = self.dense(x)
        self.add_loss(0.1 * tf.reduce_mean(tf.square(hidden)))
        return self.out(hidden)

    def train_step(self, data: Any) -> dict[str, Any]:
        x, y = data
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(tf.square(self(x, training=True) - y)) + sum(self.losses)
        gradients = tape.gradient(loss, self.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"my_loss": loss, "largest": tf.cast(tf.shape(x)[1], tf.float32)}


def test_a_train_step_of_ones_own():
    def make() -> Any:
        model = OwnStep()
        model.build((None, 5))
        model.compile(keras.optimizers.Adam(0.01, clipnorm=0.1), "mse")
        return model

    plain, joint = both(make)
    x, y = classes()
    for model in (plain, joint):
        model.history = model.fit(x, y, batch_size=20, epochs=2, shuffle=False, verbose=0)
    assert_same_state(plain, joint)
    for name in ("my_loss", "largest"):
        assert_close(joint.history.history[name], plain.history.history[name], name)
    assert_close(joint.evaluate(x, y, verbose=0), plain.evaluate(x, y, verbose=0), "evaluate")


def test_a_distributed_optimizer_in_the_scope_reduces_once():
    def make() -> Any:
        model = dense()
        optimizer = keras.optimizers.SGD(0.5, global_clipnorm=0.1)
        if tf.distribute.has_strategy():
            optimizer = kr.DistributedOptimizer(optimizer)
        model.compile(optimizer, "mse", run_eagerly=True)
        return model

    assert_same_training(make, classes(25), epochs=1)


def test_batches_by_hand_are_the_ranks_parts():
    def make() -> Any:
        model = dense()
        model.compile(keras.optimizers.SGD(0.5), "mse", metrics=[keras.metrics.AUC(name="auc")])
        return model

    plain, joint = both(make)
    x, y = classes(4 * kr.size() + 1)
    # Rank 0 has one row more than the others.
    own = slice(0, 5) if kr.rank() == 0 else slice(4 * kr.rank() + 1, 4 * kr.rank() + 5)
    for _ in range(2):
        expected = plain.train_on_batch(x, y, return_dict=True)
        logs = joint.train_on_batch(x[own], y[own], return_dict=True)
        assert_close([logs[name] for name in expected], list(expected.values()), "logs")
    assert_same_state(plain, joint)
    expected = plain.test_on_batch(x, y, return_dict=True)
    logs = joint.test_on_batch(x[own], y[own], return_dict=True)
    assert_close([logs[name] for name in expected], list(expected.values()), "logs")
    assert_close(joint.predict_on_batch(x[own]), plain.predict_on_batch(x)[own], "predict_on_batch")


@pytest.mark.parametrize("overflows", [False, True])
def test_an_overflow_on_one_rank_skips_the_step_of_all(overflows):
    with same_seed(), kr.RingStrategy().scope():
        policy = keras.mixed_precision.dtype_policy()
        keras.mixed_precision.set_dtype_policy("mixed_float16")
        try:
            model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        finally:
            keras.mixed_precision.set_dtype_policy(policy)
        optimizer = keras.optimizers.SGD(0.1)
        model.compile(keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=8), "mse")
    x, y = numbers(3, 4, seed=kr.rank()), numbers(3, 1, seed=9)
    if overflows and kr.rank() == kr.size() - 1:
        y = y * np.float32(1e30)
    before = [w.copy() for w in model.get_weights()]
    model.train_on_batch(x, y)
    has_moved = any(np.any(a != b) for a, b in zip(before, model.get_weights(), strict=True))
    assert has_moved == (not overflows)
    assert_alike_on_all_ranks([*model.weights, *model.optimizer.variables])


def test_moving_statistics_are_the_mean_over_the_rows():
    with same_seed(), kr.RingStrategy().scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((3,)), layer, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    rows = [2 + rank for rank in range(kr.size())]
    parts = [numbers(n, 3, seed=rank) + rank for rank, n in enumerate(rows)]
    own = parts[kr.rank()]
    model.train_on_batch(own, np.zeros((len(own), 1), "float32"))
    share = np.array(rows) / sum(rows)
    mean = sum(s * part.mean(0) for s, part in zip(share, parts, strict=True))
    variance = sum(s * part.var(0) for s, part in zip(share, parts, strict=True))
    assert_close(layer.moving_mean.numpy(), 0.5 * mean, "moving_mean")
    assert_close(layer.moving_variance.numpy(), 0.5 + 0.5 * variance, "moving_variance")
    assert_alike_on_all_ranks(model.weights)


def test_dropout_drops_other_units_on_each_rank_and_the_same_when_repeated():
    def masks() -> np.ndarray:
        with same_seed(), kr.RingStrategy().scope():
            layer = keras.layers.Dropout(0.5)
        return np.stack([layer(np.ones((64,), "float32"), training=True) for _ in range(2)])

    first, second = masks(), masks()
    np.testing.assert_array_equal(first, second)
    assert np.any(first[0] != first[1])
    ranks = kr.allgather_object(first.tobytes())
    assert len(set(ranks)) == kr.size()


def test_variables_begin_as_rank_0s_and_are_saved_by_one_rank(tmp_path):
    keras.utils.set_random_seed(kr.rank())
    with kr.RingStrategy().scope():
        model = dense()
        model.compile("adam", "mse", metrics=["mae"])
        made = tf.Variable(float(kr.rank()) + 1)
    assert made.numpy() == 1
    assert_alike_on_all_ranks(model.weights)
    x, y = classes(8)
    model.fit(x, y, verbose=0)
    path = str(tmp_path / "model.keras")
    if kr.rank() == 0:
        model.save(path)
        model.save_weights(str(tmp_path / "model.weights.h5"))
        outside = keras.models.load_model(path)
        assert_close(outside.predict(x, verbose=0), model(x), "loaded outside of the scope")
        np.testing.assert_array_equal(outside.optimizer.iterations.numpy(), 1)
    path = kr.broadcast_object(path)
    with kr.RingStrategy().scope():
        again = keras.models.load_model(path)
    assert_close(again.predict(x, verbose=0), model.predict(x, verbose=0), "loaded in the scope")
    again.fit(x, y, verbose=0)
    model.fit(x, y, verbose=0)
    assert_close(again.get_weights(), model.get_weights(), "trained on")
