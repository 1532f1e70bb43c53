"""Keras's callbacks in a RingStrategy's scope: all ranks decide alike, and rank 0 alone writes."""

from __future__ import annotations

import json
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
    both,
    numbers,
    same_seed,
)


def make() -> Any:
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.3, momentum=0.8), "mse", metrics=["mae"])
    return model


def data(rows: int = 26) -> tuple[np.ndarray, np.ndarray]:
    return numbers(rows, 3), numbers(rows, 1, seed=1)


class Batches(keras.callbacks.Callback):
    """Counts the batches, and stops training after some of them."""

    def __init__(self, stop_after: int | None = None, *, by_error: bool = False) -> None:
        super().__init__()
        self.num_seen = 0
        self.stop_after = stop_after
        self.by_error = by_error

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_seen += 1
        if self.num_seen == self.stop_after:
            if self.by_error:
                raise InterruptedError("as a job that has run out of time")
            self.model.stop_training = True


def fit(model: Any, callbacks: list[Any], epochs: int = 9) -> dict[str, list[float]]:
    history = model.fit(
        *data(),
        batch_size=12,
        epochs=epochs,
        shuffle=False,
        verbose=0,
        validation_data=(numbers(14, 3, seed=2), numbers(14, 1, seed=3)),
        callbacks=callbacks,
    )
    return dict(history.history)


def test_monitors_decide_as_in_one_process_and_rank_0_writes(tmp_path):
    def callbacks(folder: Path) -> list[Any]:
        return [
            keras.callbacks.ReduceLROnPlateau(
                monitor="val_loss", factor=0.5, patience=1, min_delta=0.05
            ),
            keras.callbacks.EarlyStopping(
                monitor="val_loss", patience=3, min_delta=0.05, restore_best_weights=True
            ),
            keras.callbacks.ModelCheckpoint(
                str(folder / "best.keras"), monitor="val_loss", save_best_only=True
            ),
            keras.callbacks.TensorBoard(str(folder / "logs"), histogram_freq=1),
            keras.callbacks.CSVLogger(str(folder / "log.csv")),
        ]

    plain, joint = both(make)
    (tmp_path / "plain").mkdir()
    (tmp_path / "joint").mkdir()
    expected = fit(plain, callbacks(tmp_path / "plain"))
    history = fit(joint, callbacks(tmp_path / "joint"))

    assert 3 < len(expected["loss"]) < 9
    assert len(set(expected["learning_rate"])) > 1
    assert history["learning_rate"] == expected["learning_rate"]
    for name, values in expected.items():
        assert_close(history[name], values, name)
    assert_alike_on_all_ranks([history[name] for name in sorted(history)])
    assert_same_state(plain, joint)
    written = sorted(path.name for path in (tmp_path / "joint").iterdir())
    assert written == (["best.keras", "log.csv", "logs"] if kr.rank() == 0 else [])
    if kr.rank() == 0:
        best = keras.models.load_model(tmp_path / "joint" / "best.keras")
        assert_close(best.get_weights(), plain.get_weights(), "the best")
        events = [list((tmp_path / who).rglob("events*")) for who in ("plain", "joint")]
        assert len(events[0]) == len(events[1]) > 0


def test_what_is_not_a_number_on_one_rank_stops_all_at_the_same_batch():
    _, joint = both(make)
    x, y = data()
    y[23] = np.nan  # the last rank's, in the second batch
    counter = Batches()
    history = joint.fit(
        x,
        y,
        batch_size=12,
        epochs=3,
        shuffle=False,
        verbose=0,
        callbacks=[keras.callbacks.TerminateOnNaN(), counter],
    ).history
    assert counter.num_seen == 2
    assert np.isnan(history["loss"]).tolist() == [True]


def test_a_callback_of_one_rank_stops_all_after_the_same_batch():
    _, joint = both(make)
    counter = Batches(stop_after=5 if kr.rank() == kr.size() - 1 else None)
    assert len(fit(joint, [counter])["loss"]) == 2
    assert kr.allgather_object(counter.num_seen) == [5] * kr.size()


def test_a_backup_of_rank_0_is_where_all_ranks_go_on(tmp_path):
    plain, joint = both(make)
    fit(plain, [], epochs=4)
    # A folder of its own for each rank: only rank 0 finds a backup.
    backup = keras.callbacks.BackupAndRestore(str(tmp_path / "backup"))
    with pytest.raises(InterruptedError):
        fit(joint, [backup, Batches(stop_after=8, by_error=True)], epochs=4)
    assert (tmp_path / "backup").exists() == (kr.rank() == 0)
    if kr.rank() == 0:
        metadata = json.loads((tmp_path / "backup" / "training_metadata.json").read_text())
        assert metadata["epoch"] == 2

    with same_seed(9), kr.RingStrategy().scope():
        again = make()
    counter = Batches()
    history = fit(again, [keras.callbacks.BackupAndRestore(str(tmp_path / "backup")), counter], 4)
    assert counter.num_seen == 2 * 3
    assert len(history["loss"]) == 2
    assert_same_state(plain, again)
    assert not (tmp_path / "backup").exists()


def test_the_ranks_may_not_change_the_learning_rate_apart():
    if kr.size() == 1:
        pytest.skip("one rank has no other to differ from")
    _, joint = both(make)
    mine = keras.callbacks.LearningRateScheduler(lambda _: 0.1 + kr.rank())
    with pytest.raises(
        kr.ConfigError, match=r"learning rate is 0\.1.* on rank 0 and 1\.1.* rank 1"
    ):
        fit(joint, [mine])


def test_weights_averaged_over_time_are_swapped_alike():
    def averaging() -> Any:
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.3, use_ema=True, ema_momentum=0.7)
        model.compile(optimizer, "mse", run_eagerly=True)
        return model

    plain, joint = both(averaging)
    swaps = [keras.callbacks.SwapEMAWeights(swap_on_epoch=True) for _ in range(2)]
    expected = fit(plain, [swaps[0]], epochs=2)
    history = fit(joint, [swaps[1]], epochs=2)
    assert_close(history["val_loss"], expected["val_loss"], "val_loss")
    assert_same_state(plain, joint)
    assert tf.distribute.get_strategy() is not joint.distribute_strategy
