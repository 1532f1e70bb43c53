"""A model with a distributed optimizer: what one rank's callbacks decide, all ranks do.

Each rank has data and callbacks of its own here. What holds in a scope, test_strategy_callbacks.py
tests.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

BATCH = 2


def make(rate: float = 0.1, *, is_traced: bool = False) -> Any:
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    optimizer = kr.DistributedOptimizer(keras.optimizers.SGD(rate, momentum=0.5))
    # Tracing would take longer than the few steps.
    model.compile(optimizer, "mse", run_eagerly=not is_traced)
    return model


def data(num_batches: int = 3, seed: int | None = None) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(kr.rank() if seed is None else seed)
    x = random.normal(size=(BATCH * num_batches, 3)).astype("float32")
    return x, x.sum(1, keepdims=True)


def fit(model: Any, callbacks: list[Any], *, epochs: int = 4, **arguments: Any) -> Any:
    x, y = data()
    given = {"batch_size": BATCH, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(x, y, epochs=epochs, callbacks=callbacks, **given)


def on_one_rank(callback: Any) -> list[Any]:
    """A list of callbacks that has it on the last rank alone."""
    return [callback] if kr.rank() == kr.size() - 1 else []


def is_same_everywhere(value: Any) -> bool:
    ranks = kr.allgather_object(value)
    return all(other == ranks[0] for other in ranks)


class Count(keras.callbacks.Callback):
    """Counts batches and epochs, and does something after some of the batches."""

    def __init__(self, after: int | None = None, act: Any = None) -> None:
        super().__init__()
        self.num_batches = self.num_epochs = 0
        self.after, self.act = after, act

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_batches += 1
        if self.num_batches == self.after and self.act is not None:
            self.act(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.num_epochs += 1


class Worse(keras.callbacks.Callback):
    """Gives logs a metric: on each rank its own list of values, by epoch."""

    def __init__(self, values: list[list[float]]) -> None:
        super().__init__()
        self.values = values[kr.rank()] if kr.rank() < len(values) else values[-1]

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        logs["val_loss"] = self.values[epoch]


def stop(model: Any) -> None:
    model.stop_training = True


def test_one_rank_stops_all_after_the_same_batch() -> None:
    counter = Count()
    history = fit(make(), [counter, *on_one_rank(Count(after=5, act=stop))])
    assert kr.allgather_object(counter.num_batches) == [5] * kr.size()
    assert len(history.history["loss"]) == 2


def test_what_is_not_a_number_on_one_rank_stops_all() -> None:
    x, y = data()
    if kr.rank() == kr.size() - 1:
        y[3] = np.nan
    model, counter = make(), Count()
    model.fit(
        x,
        y,
        batch_size=BATCH,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[counter, *on_one_rank(keras.callbacks.TerminateOnNaN())],
    )
    assert kr.allgather_object(counter.num_batches) == [2] * kr.size()


def test_a_callback_that_fails_on_one_rank_is_an_error_on_all() -> None:
    def fail(model: Any) -> None:
        raise InterruptedError("out of time")

    last = kr.size() - 1
    expected = InterruptedError if kr.rank() == last else kr.MismatchError
    message = "out of time"
    if kr.rank() != last:
        message = rf"fit: rank {last} failed in a callback when batch 2 ended.*out of time"
    with pytest.raises(expected, match=message):
        fit(make(), on_one_rank(Count(after=2, act=fail)))
    # In an epoch's end, too, and the ranks are in step afterwards.
    ending = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: fail(None))
    with pytest.raises(expected):
        fit(make(), on_one_rank(ending))
    assert kr.allgather_object(kr.rank()) == list(range(kr.size()))


def test_early_stopping_sees_the_mean_and_restores_the_best_epoch_of_all() -> None:
    # Better on the first rank until the end, on the others in the second epoch.
    validation = (
        np.full((4, 3), 1.0 + kr.rank(), "float32"),
        np.full((4, 1), -9.0 if kr.rank() else 3.0, "float32"),
    )
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=2, restore_best_weights=True)
    model = make(0.02)
    logs: list[float] = []
    seen = keras.callbacks.LambdaCallback(on_epoch_end=lambda _, own: logs.append(own["val_loss"]))
    fit(model, [stopping, seen], epochs=7, validation_data=validation)

    means = np.mean(kr.allgather_object(logs), axis=0)
    assert stopping.best_epoch == int(np.argmin(means))
    np.testing.assert_allclose(stopping.best, np.min(means), rtol=1e-6)
    assert is_same_everywhere((len(logs), stopping.best_epoch, stopping.stopped_epoch))
    assert is_same_everywhere([w.tobytes() for w in model.get_weights()])
    # The logs of others than those that decide are the rank's own, as MetricAverage is not there.
    assert kr.size() == 1 or not is_same_everywhere(logs)


def test_early_stopping_on_one_rank_restores_the_best_weights_of_all() -> None:
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
    model, counter = make(), Count()
    callbacks = [Worse([[1, 2, 3, 4]]), counter, *on_one_rank(stopping)]
    fit(model, callbacks)
    assert counter.num_epochs == 2
    assert is_same_everywhere([w.tobytes() for w in model.get_weights()])


def test_a_metric_that_one_rank_alone_has_decides_on_all() -> None:
    """Case B6: validation on one rank."""
    x, y = data()
    validation = (x, -y) if kr.rank() == kr.size() - 1 else None
    stopping, counter = keras.callbacks.EarlyStopping("val_loss", patience=1), Count()
    fit(make(), [stopping, counter], epochs=9, validation_data=validation)
    assert is_same_everywhere((counter.num_epochs, stopping.best))
    assert stopping.wait == 1
    assert counter.num_epochs < 9


@pytest.mark.parametrize("where", ["on all ranks", "on one rank"])
def test_the_learning_rate_falls_once_and_alike(where: str) -> None:
    plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=1, min_delta=0)
    # The first rank's is worse in the second epoch; those of the others and the mean, in the third.
    values = Worse([[4, 5, 6, 1], [4, 1, 6, 1]])
    model = make(0.5)
    rates: list[float] = []
    record = keras.callbacks.LambdaCallback(
        on_epoch_begin=lambda *_: rates.append(float(model.optimizer.learning_rate))
    )
    fit(model, [values, *([plateau] if where == "on all ranks" else on_one_rank(plateau)), record])
    expected = {1: [0.5, 0.5, 0.25, 0.125]}.get(kr.size(), [0.5, 0.5, 0.5, 0.25])
    assert kr.allgather_object(rates) == [expected] * kr.size()


def test_a_learning_rate_that_one_rank_sets_is_that_of_all() -> None:
    model = make(0.5)
    schedule = keras.callbacks.LearningRateScheduler(lambda epoch: 0.5 / (epoch + 1))
    rates: list[float] = []
    record = keras.callbacks.LambdaCallback(
        on_epoch_end=lambda *_: rates.append(float(model.optimizer.learning_rate))
    )
    fit(model, [*on_one_rank(schedule), record], epochs=2)
    assert kr.allgather_object(rates) == [[0.5, 0.25]] * kr.size()


def test_learning_rates_that_differ_are_an_error_on_all_ranks() -> None:
    if kr.size() == 1:
        pytest.skip("one rank has no other to differ from")
    with pytest.raises(
        kr.ConfigError, match=r"fit: at the start of epoch 1 the learning rate is 0\.5 on rank 0"
    ):
        fit(make(), [keras.callbacks.LearningRateScheduler(lambda _: 0.5 + kr.rank())])
    with pytest.raises(kr.ConfigError, match=r"ranks differ where each begins to train.*'epochs'"):
        fit(make(), [], epochs=2 + kr.rank())
    with pytest.raises(kr.ConfigError, match="MetricAverage"):
        fit(make(), [kr.callbacks.MetricAverage()] if kr.rank() == 0 else [])


def test_files_that_all_ranks_name_alike_are_written_by_rank_0(tmp_path: Path) -> None:
    shared = Path(kr.broadcast_object(str(tmp_path)))
    model = make()
    own = keras.callbacks.ModelCheckpoint(str(shared / f"own{kr.rank()}.keras"))
    tensorboard = keras.callbacks.TensorBoard(str(shared / "logs"))
    fit(
        model,
        [
            keras.callbacks.ModelCheckpoint(
                str(shared / "best.keras"), monitor="loss", save_best_only=True
            ),
            own,
            tensorboard,
            keras.callbacks.CSVLogger(str(shared / "log.csv")),
        ],
        epochs=2,
    )
    kr.barrier()
    written = sorted(path.name for path in shared.iterdir() if path.name.endswith(".keras"))
    assert written == ["best.keras", *(f"own{r}.keras" for r in range(kr.size()))]
    assert len((shared / "log.csv").read_text().splitlines()) == 3
    assert len(list(shared.rglob("events*"))) == 1
    loaded = keras.saving.load_model(shared / f"own{kr.rank()}.keras")
    for ours, its in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(ours, its)


@pytest.mark.parametrize("place", ["shared", "on rank 0"])
def test_a_backup_is_where_all_ranks_go_on(tmp_path: Path, place: str) -> None:
    folder = kr.broadcast_object(str(tmp_path)) if place == "shared" else str(tmp_path)
    folder += "/backup"

    def fail(model: Any) -> None:
        raise InterruptedError

    uninterrupted = make()
    fit(uninterrupted, [], epochs=3)
    with pytest.raises(InterruptedError):
        fit(
            make(),
            [keras.callbacks.BackupAndRestore(folder), Count(after=5, act=fail)],
            epochs=3,
        )
    if place == "on rank 0" and kr.rank() != 0 and Path(folder).exists():
        # Another disk: what this rank has written is not rank 0's, and gone.
        for path in Path(folder).iterdir():
            path.unlink()
    if kr.rank() == 0:
        assert json.loads((Path(folder) / "training_metadata.json").read_text())["epoch"] == 1
    model, counter = make(rate=0.3 if kr.rank() and place != "shared" else 0.1), Count()
    fit(model, [keras.callbacks.BackupAndRestore(folder), counter], epochs=3)
    assert counter.num_batches == 2 * 3
    for ours, expected in zip(model.get_weights(), uninterrupted.get_weights(), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-6)
    kr.barrier()
    assert not Path(folder).exists() or place != "shared"


def uneven(kind: str, num_batches: int) -> dict[str, Any]:
    x, y = data(num_batches)

    def batches() -> Any:
        for i in range(num_batches):
            yield x[BATCH * i : BATCH * (i + 1)], y[BATCH * i : BATCH * (i + 1)]

    if kind == "arrays":
        return {"x": x, "y": y, "batch_size": BATCH, "shuffle": False}
    if kind == "steps_per_epoch":
        dataset = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH).repeat()
        return {"x": dataset, "steps_per_epoch": num_batches}
    if kind == "some known" and kr.rank() != 1:
        return {"x": tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)}
    signature = tuple(tf.TensorSpec((None, n), tf.float32) for n in (3, 1))
    return {"x": tf.data.Dataset.from_generator(batches, output_signature=signature)}


@pytest.mark.parametrize("kind", ["arrays", "steps_per_epoch", "unknown", "some known"])
@pytest.mark.parametrize("steps_per_execution", [1, 2])
def test_an_epoch_ends_with_the_rank_that_has_the_fewest_batches(
    kind: str, steps_per_execution: int
) -> None:
    """Case A3: 10, 9 and 7 batches, and the validations uneven too."""
    lengths = [10, 7, 9, 8][: kr.size()]
    shortest = min(lengths)
    model = make()
    model.compile(
        model.optimizer,
        "mse",
        steps_per_execution=steps_per_execution,
        run_eagerly=steps_per_execution == 1 and kind == "arrays",
    )
    validation = data(1 + kr.rank())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        history = model.fit(
            **uneven(kind, lengths[kr.rank()]),
            epochs=2,
            verbose=0,
            validation_data=validation,
            callbacks=[kr.callbacks.MetricAverage()],
        )
    assert len(history.history["val_loss"]) == 2
    assert is_same_everywhere(history.history["loss"])
    num_steps = shortest
    if kind == "steps_per_epoch":  # Keras takes whole executions, if there is data
        num_steps = -(-shortest // steps_per_execution) * steps_per_execution
    if kr.size() > 1:  # Keras alone counts a step for the batch that it has not found
        assert int(model.optimizer.iterations) == 2 * num_steps
    assert is_same_everywhere([w.tobytes() for w in model.get_weights()])
    ours = [str(w.message) for w in caught if str(w.message).startswith("fit:")]
    if kr.size() == 1 or kr.rank() != 0:
        assert ours == []
    elif kind in ("arrays", "steps_per_epoch"):
        (text,) = ours
        for rank, length in enumerate(lengths):
            assert f"rank {rank} has {length}" in text
        assert f"ends after {shortest} on all ranks" in text
    else:
        text = next(t for t in ours if "had no more" in t)
        assert f"after {shortest} batches" in text
        assert f"rank {lengths.index(shortest)} had no more" in text


def test_the_steps_are_those_of_one_process_on_the_batches_of_all_ranks() -> None:
    lengths = [5, 3, 4, 4][: kr.size()]
    model, oracle = make(is_traced=True), make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model.fit(**uneven("unknown", lengths[kr.rank()]), epochs=1, verbose=0)
    oracle.compile(keras.optimizers.SGD(0.1, momentum=0.5), "mse")
    parts = [data(length, seed=rank) for rank, length in enumerate(lengths)]
    for i in range(min(lengths)):
        rows = slice(BATCH * i, BATCH * (i + 1))
        x, y = (np.concatenate([part[k][rows] for part in parts]) for k in range(2))
        oracle.train_on_batch(x, y)
    for ours, expected in zip(model.get_weights(), oracle.get_weights(), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-6)


def test_a_rank_without_batches_is_an_error_on_all_ranks() -> None:
    if kr.size() == 1:
        pytest.skip("one rank has no other to wait for")
    dataset = tf.data.Dataset.from_tensor_slices(data(2)).batch(BATCH)
    if kr.rank() == 1:
        dataset = dataset.take(0)
    with pytest.raises(kr.ConfigError, match=r"fit: the data of rank 1 has no batch at all"):
        make().fit(dataset, verbose=0)


def test_one_rank_may_stop_in_data_of_unknown_length() -> None:
    counter = Count()
    make(is_traced=True).fit(
        **uneven("unknown", 6),
        epochs=3,
        verbose=0,
        callbacks=[counter, *on_one_rank(Count(after=3, act=stop))],
    )
    assert kr.allgather_object(counter.num_batches) == [3] * kr.size()


def test_ranks_of_a_set_agree_among_themselves() -> None:
    if kr.size() < 3:
        pytest.skip("a set that is not all, with a rank that decides and one that follows")
    process_set = kr.add_process_set([0, kr.size() - 1])
    if process_set.included():
        keras.utils.set_random_seed(5)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile(kr.DistributedOptimizer("sgd", process_set=process_set), "mse")
        counter = Count()
        model.fit(
            *data(),
            batch_size=BATCH,
            verbose=0,
            callbacks=[counter, *on_one_rank(Count(after=2, act=stop))],
        )
        assert counter.num_batches == 2
    kr.barrier()
    kr.remove_process_set(process_set)
