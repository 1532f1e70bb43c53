"""The callbacks, through real calls of fit."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr
from keras_ring import reducer

FEATURES, BATCH = 4, 2


def build(seed: int | None = None, dropout: float = 0.0) -> Any:
    """A model with weights of every kind; they differ by rank unless a seed is given."""
    keras.utils.set_random_seed(kr.rank() if seed is None else seed)
    normalization = keras.layers.Normalization()
    normalization.adapt(make_data(2)[0])
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            normalization,
            keras.layers.Dense(3),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(dropout),
            keras.layers.Dense(1),
        ]
    )


def make_data(steps: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(kr.rank())
    x = random.normal(size=(steps * BATCH, FEATURES)).astype("float32")
    return x, x.sum(1, keepdims=True) + kr.rank()


def fit(model: Any, callbacks: list[Any], steps: int = 2, **arguments: Any) -> Any:
    x, y = make_data(steps)
    given = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(x, y, callbacks=callbacks, **given)


def digests(variables: list[Any]) -> set[str]:
    """The different values that the ranks have."""
    own = b"".join(np.asarray(v.numpy()).tobytes() for v in variables)
    return set(kr.allgather_object(hashlib.sha256(own).hexdigest()))


class AtFirstBatch(keras.callbacks.Callback):
    """Looks at the model when the first batch begins or ends."""

    def __init__(self, look: Callable[[Any], Any], at: str = "begin") -> None:
        super().__init__()
        self.look, self.at, self.seen = look, at, None

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if self.at == "begin" and batch == 0:
            self.seen = self.look(self.model)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.at == "end" and batch == 0:
            self.seen = self.look(self.model)


class Record(keras.callbacks.Callback):
    """Keeps the learning rate of each batch and the logs of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []
        self.logs: list[dict[str, float]] = []
        self.train_end: dict[str, float] = {}

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.rates.append(float(self.model.optimizer.learning_rate.numpy()))

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.logs.append(dict(logs))

    def on_train_end(self, logs: Any = None) -> None:
        self.train_end = dict(logs)


def test_initial_weights_are_those_of_root_before_the_first_batch() -> None:
    root = kr.size() - 1
    model = build()
    model.compile(
        kr.DistributedOptimizer(keras.optimizers.Adam(0.01 * (kr.rank() + 1))),
        "mse",
        run_eagerly=True,
    )
    expected = kr.allgather_object(model.get_weights())[root]
    look = AtFirstBatch(lambda m: [w.numpy() for w in m.weights])

    fit(model, [kr.callbacks.BroadcastInitialWeights(root_rank=root), look])

    for seen, value in zip(look.seen, expected, strict=True):
        np.testing.assert_array_equal(seen, value)
    # BatchNormalization's moving statistics are each rank's own again after a batch.
    assert len(digests(model.trainable_weights + model.optimizer.variables)) == 1
    np.testing.assert_allclose(model.optimizer.learning_rate.numpy(), 0.01 * (root + 1))


def test_initial_optimizer_state_is_that_of_root() -> None:
    model = build()
    model.compile(keras.optimizers.Adam(), "mse", run_eagerly=True)
    if kr.rank() == 0:
        fit(model, [], steps=3)
    model.compile(kr.DistributedOptimizer(model.optimizer), "mse", run_eagerly=True)
    look = AtFirstBatch(lambda m: int(m.optimizer.iterations.numpy()))

    fit(model, [kr.callbacks.BroadcastInitialWeights(), look], steps=1)

    assert look.seen == 3
    assert len(digests(model.trainable_weights + model.optimizer.variables)) == 1


def test_model_built_by_its_first_batch_gets_weights_right_after_it() -> None:
    class Lazy(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(1)

        def call(self, x: Any) -> Any:
            # Keras cannot run this with symbolic tensors, so it does not build the model itself.
            if not isinstance(x, tf.Tensor):
                raise TypeError("needs values")
            return self.dense(x)

    keras.utils.set_random_seed(kr.rank())
    model = Lazy()
    model.compile(kr.DistributedOptimizer(keras.optimizers.Adam()), "mse", run_eagerly=True)
    look = AtFirstBatch(lambda m: digests(m.weights + m.optimizer.variables), at="end")

    fit(model, [kr.callbacks.BroadcastInitialWeights(), look])

    assert len(look.seen) == 1


def test_every_fit_broadcasts_and_leaves_random_states_alone() -> None:
    model = build(dropout=0.5)
    model.compile(kr.DistributedOptimizer("sgd"), "mse", run_eagerly=True)
    states = [v for v in model.variables if "seed" in v.path]
    assert states
    fit(model, [kr.callbacks.BroadcastInitialWeights()])
    assert len(digests(states)) == kr.size()
    if kr.rank() == 0:
        model.set_weights([w + 1 for w in model.get_weights()])

    look = AtFirstBatch(lambda m: digests(m.weights))
    fit(model, [kr.callbacks.BroadcastInitialWeights(), look])

    assert len(look.seen) == 1


def test_initial_loss_scale_is_that_of_root() -> None:
    model = build()
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(), initial_scale=2.0**8)
    model.compile(kr.DistributedOptimizer(scaled), "mse", run_eagerly=True)
    scaled.build(model.trainable_variables)
    scaled.dynamic_scale.assign(2.0 ** (kr.rank() + 4))
    look = AtFirstBatch(lambda m: float(m.optimizer.dynamic_scale.numpy()))

    fit(model, [kr.callbacks.BroadcastInitialWeights(), look])

    assert look.seen == 2.0**4


def test_what_a_rank_has_accumulated_stays_its_own() -> None:
    if not hasattr(keras.optimizers.SGD(), "gradient_accumulation_steps"):
        pytest.skip("no accumulation in this Keras")
    model = build(seed=1)
    model.compile(
        kr.DistributedOptimizer(keras.optimizers.SGD(gradient_accumulation_steps=3)), "mse"
    )
    fit(model, [kr.callbacks.BroadcastInitialWeights()], steps=1)
    accumulators = reducer.gradient_accumulators(model.optimizer)
    own = [v.numpy() for v in accumulators]
    look = AtFirstBatch(lambda m: [v.numpy() for v in accumulators])

    fit(model, [kr.callbacks.BroadcastInitialWeights(), look], steps=2)

    for seen, value in zip(look.seen, own, strict=True):
        np.testing.assert_array_equal(seen, value)
    assert len(digests(model.trainable_weights)) == 1


@pytest.mark.parametrize("root_rank", [-1, 99])
def test_broadcast_from_no_rank_is_refused(root_rank: int) -> None:
    model = build()
    model.compile("sgd", "mse", run_eagerly=True)

    with pytest.raises(kr.ConfigError, match=f"root_rank is {root_rank}; expected one of the rank"):
        fit(model, [kr.callbacks.BroadcastInitialWeights(root_rank=root_rank)])


def test_different_models_are_an_error_on_every_rank() -> None:
    if kr.size() == 1:
        pytest.skip("takes two ranks to differ")
    units = 3 + (kr.rank() == kr.size() - 1)
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(units)])
    model.compile(kr.DistributedOptimizer("sgd"), "mse", run_eagerly=True)

    with pytest.raises(
        kr.MismatchError,
        match=rf"variable 0 .*rank 0 has float32 of shape \(4, 3\), rank {kr.size() - 1} has "
        r"float32 of shape \(4, 4\)",
    ):
        model.fit(
            np.ones((2, FEATURES)),
            np.ones((2, units)),
            verbose=0,
            callbacks=[kr.callbacks.BroadcastInitialWeights()],
        )


def test_metric_average_reaches_later_callbacks_and_history() -> None:
    model = build(seed=1)
    model.compile("sgd", "mse", metrics=["mae"], run_eagerly=True)
    before, after = Record(), Record()

    history = fit(
        model,
        [before, kr.callbacks.MetricAverage(), after],
        epochs=2,
        validation_data=make_data(1),
    )

    for epoch in range(2):
        ranks = kr.allgather_object(before.logs[epoch])
        assert {"loss", "mae", "val_loss", "val_mae"} <= set(ranks[0])
        for name in ranks[0]:
            mean = np.mean([logs[name] for logs in ranks])
            np.testing.assert_allclose(after.logs[epoch][name], mean, rtol=1e-6)
            assert history.history[name][epoch] == after.logs[epoch][name]
    assert after.train_end == after.logs[-1]
    assert len(set(kr.allgather_object(str(history.history)))) == 1


def test_metric_average_lets_early_stopping_stop_all_ranks() -> None:
    model = build(seed=1)
    model.compile(kr.DistributedOptimizer(keras.optimizers.SGD(0.0)), "mse", run_eagerly=True)
    x, y = make_data(1)

    class Worsen(keras.callbacks.Callback):
        """The validation loss rises on the last rank only, and more than it falls on the others."""

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            is_last = kr.rank() == kr.size() - 1
            logs["val_loss"] = 10.0 * epoch if is_last else -float(epoch)

    history = fit(
        model,
        [Worsen(), kr.callbacks.MetricAverage(), keras.callbacks.EarlyStopping(patience=0)],
        epochs=5,
        validation_data=(x, y),
    )

    assert kr.allgather_object(len(history.epoch)) == [2] * kr.size()


def test_metrics_that_some_ranks_lack_stay_local_and_are_named_once() -> None:
    model = build(seed=1)
    model.compile("sgd", "mse", run_eagerly=True)
    data = make_data(1) if kr.rank() == 0 else None

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = fit(model, [kr.callbacks.MetricAverage()], epochs=3, validation_data=data)

    assert len(set(kr.allgather_object(tuple(history.history["loss"])))) == 1
    assert ("val_loss" in history.history) == (kr.rank() == 0)
    texts = [str(w.message) for w in caught if "MetricAverage" in str(w.message)]
    assert len(texts) == (1 if kr.rank() == 0 and kr.size() > 1 else 0)
    if texts:
        assert f"'val_loss': ranks {list(range(1, kr.size()))}" in texts[0]


def test_metric_average_with_validation_freq_and_other_entries() -> None:
    model = build(seed=1)
    model.compile("sgd", "mse", run_eagerly=True)

    class Notes(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs.update(note="text", flag=True, vector=np.ones(2), count=np.int64(kr.rank()))

    record = Record()
    fit(
        model,
        [Notes(), kr.callbacks.MetricAverage(), record],
        epochs=2,
        validation_data=make_data(1),
        validation_freq=2,
    )

    assert ["val_loss" in logs for logs in record.logs] == [False, True]
    assert record.logs[0]["note"] == "text"
    assert record.logs[0]["flag"] is True
    assert record.logs[0]["vector"].tolist() == [1.0, 1.0]
    assert record.logs[0]["count"] == (kr.size() - 1) / 2


def test_metric_average_in_evaluate_averages_the_logs() -> None:
    model = build(seed=1)
    model.compile("sgd", "mse", run_eagerly=True)
    seen = {}

    class End(keras.callbacks.Callback):
        def on_test_end(self, logs: Any = None) -> None:
            seen.update(logs)

    x, y = make_data(2)
    own = model.evaluate(
        x, y, verbose=0, return_dict=True, callbacks=[kr.callbacks.MetricAverage(), End()]
    )

    mean = np.mean([result["loss"] for result in kr.allgather_object(dict(own))])
    np.testing.assert_allclose(seen["loss"], mean, rtol=1e-6)


def warmup_line(progress: float) -> float:
    return 0.8 * (1 / kr.size() + (1 - 1 / kr.size()) * min(progress, 1.0))


def compiled(optimizer: Any = None, **arguments: Any) -> Any:
    model = keras.Sequential([keras.Input((FEATURES,)), keras.layers.Dense(1)])
    model.compile(
        optimizer or keras.optimizers.SGD(0.8), "mse", **{"run_eagerly": True, **arguments}
    )
    return model


@pytest.mark.parametrize("warmup_epochs, is_scaled", [(2, False), (1.5, True), (1, False)])
def test_warmup_follows_the_line(warmup_epochs: float, is_scaled: bool) -> None:
    sgd = keras.optimizers.SGD(0.8)
    model = compiled(keras.optimizers.LossScaleOptimizer(sgd) if is_scaled else sgd)
    record = Record()
    warmup = kr.callbacks.LearningRateWarmup(0.8, warmup_epochs=warmup_epochs)

    fit(model, [warmup, record], steps=4, epochs=3)

    expected = [warmup_line(batch / 4 / warmup_epochs) for batch in range(12)]
    np.testing.assert_allclose(record.rates, expected, rtol=1e-6)
    np.testing.assert_allclose(record.logs[-1]["learning_rate"], 0.8, rtol=1e-6)


def test_warmup_ends_with_its_last_epoch_and_says_so_on_rank_0(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = compiled()
    fit(model, [kr.callbacks.LearningRateWarmup(0.8, warmup_epochs=1, verbose=1)], epochs=1)

    np.testing.assert_allclose(model.optimizer.learning_rate.numpy(), 0.8, rtol=1e-6)
    said = "LearningRateWarmup: epoch 1: learning rate 0.8" in capsys.readouterr().out
    assert said == (kr.rank() == 0)


def test_warmup_of_no_epochs_or_resumed_past_it_leaves_the_rate_alone() -> None:
    for warmup_epochs, initial_epoch in [(0, 0), (2, 2), (2, 5)]:
        model = compiled(keras.optimizers.SGD(0.3))
        record = Record()
        warmup = kr.callbacks.LearningRateWarmup(0.8, warmup_epochs=warmup_epochs)

        fit(model, [warmup, record], epochs=initial_epoch + 1, initial_epoch=initial_epoch)

        np.testing.assert_allclose(record.rates, [0.3, 0.3], rtol=1e-6)


def test_warmup_resumed_within_it_continues_and_a_new_fit_begins_again() -> None:
    model = compiled()
    record = Record()
    warmup = kr.callbacks.LearningRateWarmup(0.8, warmup_epochs=4)

    fit(model, [warmup, record], epochs=3, initial_epoch=2)
    fit(model, [warmup, record], epochs=1)

    expected = [warmup_line((2 + b / 2) / 4) for b in range(2)]
    expected += [warmup_line(b / 2 / 4) for b in range(2)]
    np.testing.assert_allclose(record.rates, expected, rtol=1e-6)


def test_warmup_with_several_steps_per_execution() -> None:
    model = compiled(steps_per_execution=2, run_eagerly=False)
    record = Record()

    fit(model, [kr.callbacks.LearningRateWarmup(0.8, warmup_epochs=1), record], steps=4)

    np.testing.assert_allclose(record.rates, [warmup_line(0.0), warmup_line(0.5)], rtol=1e-6)


def endless_epoch(steps: int) -> Any:
    """A dataset whose length Keras does not know."""
    x, y = make_data(steps)
    dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
    return dataset.filter(lambda *_: True)


def test_warmup_with_unknown_steps_counts_the_first_epoch() -> None:
    model = compiled()
    record = Record()
    warmup = kr.callbacks.LearningRateWarmup(0.8, warmup_epochs=3)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(endless_epoch(4), epochs=4, verbose=0, callbacks=[warmup, record])

    expected = [warmup_line(0.0)] * 4 + [warmup_line((4 + b) / 4 / 3) for b in range(12)]
    np.testing.assert_allclose(record.rates, expected, rtol=1e-6)
    texts = [str(w.message) for w in caught if "LearningRateWarmup" in str(w.message)]
    assert len(texts) == (kr.rank() == 0)
    assert all("Pass steps_per_epoch" in text for text in texts)


def test_warmup_told_the_steps_does_not_wait_for_a_count() -> None:
    model = compiled()
    record = Record()
    warmup = kr.callbacks.LearningRateWarmup(0.8, warmup_epochs=1, steps_per_epoch=4)

    model.fit(endless_epoch(4), verbose=0, callbacks=[warmup, record])

    np.testing.assert_allclose(record.rates, [warmup_line(b / 4) for b in range(4)], rtol=1e-6)


def test_rates_are_equal_on_ranks_with_different_numbers_of_steps() -> None:
    model = compiled()
    record = Record()

    fit(model, [kr.callbacks.LearningRateWarmup(0.8, warmup_epochs=1), record], steps=2 + kr.rank())

    np.testing.assert_allclose(record.rates[:2], [warmup_line(b / 2) for b in range(2)], rtol=1e-6)


@pytest.mark.parametrize(
    "rate",
    [keras.optimizers.schedules.CosineDecay(0.1, 10), lambda *_: 0.1],
    ids=["object", "call"],
)
@pytest.mark.parametrize("is_scaled", [False, True])
def test_rate_that_is_a_schedule_is_refused_with_the_remedy(rate: Any, is_scaled: bool) -> None:
    sgd = keras.optimizers.SGD(rate)
    model = compiled(keras.optimizers.LossScaleOptimizer(sgd) if is_scaled else sgd)

    with pytest.raises(
        kr.ConfigError, match="built with a schedule or a function.*CosineDecay.*warmup_target"
    ):
        fit(model, [kr.callbacks.LearningRateWarmup(0.8)])


def test_optimizer_without_a_rate_is_refused() -> None:
    if not hasattr(keras.optimizers, "MultiOptimizer"):
        pytest.skip("newer Keras")
    multi = keras.optimizers.MultiOptimizer(
        keras.optimizers.OptimizerMap(keras.optimizers.SGD(0.1))
    )

    with pytest.raises(kr.ConfigError, match="MultiOptimizer has no learning rate of its own"):
        fit(compiled(multi), [kr.callbacks.LearningRateWarmup(0.8)])


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: kr.callbacks.LearningRateWarmup(0.0), "initial_lr is 0.0; expected"),
        (lambda: kr.callbacks.LearningRateWarmup(1.0, warmup_epochs=-1), "warmup_epochs is -1"),
        (lambda: kr.callbacks.LearningRateWarmup(1.0, steps_per_epoch=0), "steps_per_epoch is 0"),
        (lambda: kr.callbacks.LearningRateSchedule(1.0, "x"), "multiplier is 'x'"),
        (
            lambda: kr.callbacks.LearningRateSchedule(1.0, 0.5, start_epoch=3, end_epoch=2),
            "end_epoch is 2 and start_epoch is 3",
        ),
    ],
)
def test_arguments_out_of_range_are_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(kr.ConfigError, match=message):
        make()


def test_schedules_share_a_training_with_a_warmup() -> None:
    model = compiled()
    record = Record()
    callbacks = [
        kr.callbacks.LearningRateWarmup(0.8, warmup_epochs=1),
        kr.callbacks.LearningRateSchedule(0.8, 0.5, start_epoch=1, end_epoch=3),
        kr.callbacks.LearningRateSchedule(0.8, lambda e: 1 / (1 + e), start_epoch=3),
        record,
    ]

    fit(model, callbacks, epochs=4)

    expected = [warmup_line(0.0), warmup_line(0.5), 0.8, 0.8, 0.4, 0.4, 0.2, 0.2]
    np.testing.assert_allclose(record.rates, expected, rtol=1e-6)


def test_schedule_without_staircase_changes_with_each_batch() -> None:
    model = compiled()
    record = Record()
    schedule = kr.callbacks.LearningRateSchedule(0.8, lambda e: 2.0**-e, staircase=False)

    fit(model, [schedule, record], epochs=2)

    expected = [0.8 * 2.0**-e for e in (0, 0.5, 1, 1.5)]
    np.testing.assert_allclose(record.rates, expected, rtol=1e-6)
