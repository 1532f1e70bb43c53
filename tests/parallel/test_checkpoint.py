"""A training that goes on from `Checkpoint`'s file is the one that was not interrupted."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

NUM_BATCHES = 4
JOINT_BATCH = 12  # for 1 to 4 ranks

ROADS = pytest.mark.parametrize("road", ["optimizer", "strategy"])


class KilledError(Exception):
    """As a job that has run out of time."""


class Kill(keras.callbacks.Callback):
    """Counts the batches and raises on every rank after some of them."""

    def __init__(self, after: int | None = None) -> None:
        super().__init__()
        self.after = after
        self.num_batches = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.num_batches += 1
        if self.num_batches == self.after:
            raise KilledError


def make(
    road: str, make_optimizer: Any = lambda: keras.optimizers.Adam(0.1), *, units: int = 2
) -> Any:
    keras.utils.set_random_seed(5)
    scope = kr.RingStrategy().scope() if road == "strategy" else contextlib.nullcontext()
    with scope:
        model = keras.Sequential(
            [
                keras.Input((3,)),
                keras.layers.Dense(units, name="first"),
                keras.layers.Dropout(0.25),
                keras.layers.Dense(1, name="last"),
            ]
        )
        optimizer = make_optimizer()
        if road == "optimizer":
            optimizer = kr.DistributedOptimizer(optimizer)
        model.compile(optimizer, "mse", metrics=["mae"], run_eagerly=road == "optimizer")
    return model


def data(road: str) -> tuple[np.ndarray, np.ndarray, int]:
    x = np.random.default_rng(1).normal(size=(NUM_BATCHES * JOINT_BATCH, 3)).astype("float32")
    if road == "strategy":
        return x, x.sum(1, keepdims=True), JOINT_BATCH
    # Each rank's rows of every joint batch.
    batch = JOINT_BATCH // kr.size()
    x = x.reshape(NUM_BATCHES, kr.size(), batch, 3)[:, kr.rank()].reshape(-1, 3)
    return x, x.sum(1, keepdims=True), batch


def fit(road: str, model: Any, callbacks: list[Any], epochs: int = 4, **arguments: Any) -> Any:
    x, y, batch = data(road)
    given = {"batch_size": batch, "shuffle": False, "verbose": 0, **arguments}
    return model.fit(x, y, epochs=epochs, callbacks=callbacks, **given)


def state_of(model: Any) -> list[np.ndarray]:
    variables = [*model.variables, *model.optimizer.variables]
    return [np.array(keras.ops.convert_to_numpy(v)) for v in variables]


def shared(path: Path) -> Path:
    """Rank 0's folder."""
    return Path(kr.broadcast_object(str(path)))


def assert_goes_on(
    road: str, path: Path, every: Any, after: int, num_left: int, **arguments: Any
) -> None:
    whole = make(road)
    expected = fit(road, whole, [], **arguments)
    killed = [kr.callbacks.Checkpoint(path, every), Kill(after)]
    with pytest.raises(KilledError):
        fit(road, make(road), killed, **arguments)
    again, counter = make(road), Kill()
    history = fit(road, again, [kr.callbacks.Checkpoint(path, every), counter], **arguments)
    assert counter.num_batches == num_left
    assert history.epoch == [0, 1, 2, 3]
    assert history.history.keys() == expected.history.keys()
    for name, values in expected.history.items():
        np.testing.assert_allclose(history.history[name], values, rtol=1e-5, err_msg=name)
    for own, other in zip(state_of(whole), state_of(again), strict=True):
        np.testing.assert_array_equal(own, other)


@ROADS
def test_a_training_goes_on_from_the_last_epoch_as_if_it_had_not_ended(
    road: str, tmp_path: Path
) -> None:
    path = shared(tmp_path) / "run" / "state.npz"
    assert_goes_on(road, path, "epoch", after=10, num_left=8)


@ROADS
def test_a_training_goes_on_in_the_midst_of_an_epoch(road: str, tmp_path: Path) -> None:
    # After batches 3 and 6; the seventh is lost.
    assert_goes_on(road, shared(tmp_path) / "state.npz", 3, after=7, num_left=10)


@ROADS
def test_shuffles_go_on_too(road: str, tmp_path: Path) -> None:
    path = shared(tmp_path) / "state.npz"
    assert_goes_on(road, path, 3, after=7, num_left=10, shuffle=True)


def test_a_file_that_rank_0_alone_sees_is_enough_and_others_do_not_write(tmp_path: Path) -> None:
    own = tmp_path / f"rank{kr.rank()}" / "state.npz"
    fit("optimizer", make("optimizer"), [kr.callbacks.Checkpoint(own)], epochs=2)
    assert own.exists() == (kr.rank() == 0)
    assert sorted(p.name for p in own.parent.parent.rglob("*.npz*")) == (
        ["state.npz"] if kr.rank() == 0 else []
    )
    counter = Kill()
    again = make("optimizer")
    fit("optimizer", again, [kr.callbacks.Checkpoint(own), counter], epochs=3)
    assert counter.num_batches == NUM_BATCHES
    weights = kr.allgather_object([w.tolist() for w in again.get_weights()])
    assert all(each == weights[0] for each in weights)


def test_a_finished_training_does_nothing_more_and_returns_its_history(tmp_path: Path) -> None:
    path, road = shared(tmp_path) / "state.npz", "optimizer"
    first = fit(road, make(road), [kr.callbacks.Checkpoint(path)], epochs=2)
    counter, again = Kill(), make(road)
    history = fit(road, again, [kr.callbacks.Checkpoint(path), counter], epochs=2)
    assert counter.num_batches == 0
    assert history.epoch == [0, 1]
    assert history.history == first.history
    # A later fit without it begins where it is told.
    assert fit(road, again, [counter], epochs=1).epoch == [0]
    assert counter.num_batches == NUM_BATCHES


def test_a_training_that_was_stopped_in_an_epoch_goes_on_at_the_next_batch(tmp_path: Path) -> None:
    path, road = shared(tmp_path) / "state.npz", "optimizer"
    whole = make(road)
    x, y, _ = data(road)
    expected = fit(road, whole, [], epochs=3, validation_data=(x, y)).history

    class Stop(Kill):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.num_batches += 1
            self.model.stop_training = self.num_batches == 6

    callbacks = [kr.callbacks.Checkpoint(path), Stop()]
    fit(road, make(road), callbacks, epochs=3, validation_data=(x, y))
    counter, again = Kill(), make(road)
    callbacks = [kr.callbacks.Checkpoint(path), counter]
    history = fit(road, again, callbacks, epochs=3, validation_data=(x, y)).history
    assert counter.num_batches == 3 * NUM_BATCHES - 6
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)


@ROADS
def test_gradients_that_were_accumulated_are_not_lost(road: str, tmp_path: Path) -> None:
    path = shared(tmp_path) / "state.npz"

    def accumulating() -> Any:
        return make(road, lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))

    whole, again = accumulating(), accumulating()
    fit(road, whole, [], epochs=1)
    with pytest.raises(KilledError):
        fit(road, accumulating(), [kr.callbacks.Checkpoint(path, 3), Kill(4)], epochs=1)
    fit(road, again, [kr.callbacks.Checkpoint(path, 3)], epochs=1)
    for own, other in zip(whole.get_weights(), again.get_weights(), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-5, atol=1e-6)


def test_what_python_and_numpy_draw_goes_on_on_each_rank(tmp_path: Path) -> None:
    path, road = shared(tmp_path) / "state.npz", "optimizer"
    drawn: list[float] = []
    draw = keras.callbacks.LambdaCallback(
        on_train_batch_begin=lambda *_, **__: drawn.append(float(np.random.rand()))
    )

    def train(callbacks: list[Any]) -> list[float]:
        model = make(road)
        np.random.seed(kr.rank())
        drawn.clear()
        with contextlib.suppress(KilledError):
            fit(road, model, callbacks, epochs=3)
        return list(drawn)

    whole = train([draw])
    train([kr.callbacks.Checkpoint(path), draw, Kill(5)])
    assert train([kr.callbacks.Checkpoint(path), draw]) == whole[NUM_BATCHES:]


def test_a_dataset_of_unknown_length_and_one_that_repeats_go_on(tmp_path: Path) -> None:
    rows = np.arange(48, dtype="float32").reshape(16, 3) / 48

    def unknown() -> Any:
        whole = tf.data.Dataset.from_tensor_slices((rows, rows.sum(1, keepdims=True)))
        return whole.shuffle(16, seed=2).batch(4).filter(lambda *_: True)

    for name, dataset, arguments in [
        ("unknown", unknown, {}),
        ("repeats", lambda: unknown().repeat(), {"steps_per_epoch": 3}),
    ]:
        path = shared(tmp_path) / name

        def train(callbacks: list[Any], dataset: Any = dataset, arguments: Any = arguments) -> Any:
            model = make("optimizer")
            given = {"epochs": 3, "verbose": 0, **arguments}
            with contextlib.suppress(KilledError):
                model.fit(dataset(), callbacks=callbacks, **given)
            return model.get_weights()

        expected = train([])
        train([kr.callbacks.Checkpoint(path, 2), Kill(7)])
        for own, other in zip(train([kr.callbacks.Checkpoint(path, 2)]), expected, strict=True):
            np.testing.assert_array_equal(own, other, err_msg=name)


def test_data_with_an_epoch_is_told_which_one_comes(tmp_path: Path) -> None:
    path = shared(tmp_path) / "state.npz"

    class Shard(keras.utils.PyDataset):
        epoch = 0

        def __init__(self) -> None:
            super().__init__()
            self.read: list[tuple[int, int]] = []

        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> Any:
            self.read.append((self.epoch, index))
            return np.ones((2, 3), "float32"), np.ones((2, 1), "float32")

    make("optimizer").fit(Shard(), epochs=2, verbose=0, callbacks=[kr.callbacks.Checkpoint(path)])
    shard = Shard()
    make("optimizer").fit(shard, epochs=3, verbose=0, callbacks=[kr.callbacks.Checkpoint(path)])
    assert shard.epoch == 2
    assert (2, 1) in shard.read


@ROADS
def test_a_file_that_is_not_whole_is_an_error_on_every_rank(road: str, tmp_path: Path) -> None:
    path = shared(tmp_path) / "state.npz"
    fit(road, make(road), [kr.callbacks.Checkpoint(path)], epochs=1)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[200] ^= 1  # within an array
    kr.barrier()
    for damaged in (whole[: len(whole) // 2], b"", b"PK of something else", bytes(flipped)):
        if kr.rank() == 0:
            path.write_bytes(damaged)
        kr.barrier()
        with pytest.raises(kr.ConfigError, match=r"state\.npz is not a whole checkpoint.*Remove"):
            fit(road, make(road), [kr.callbacks.Checkpoint(path)], epochs=1)
    if kr.rank() == 0:
        np.savez(path, a=np.ones(3))
    kr.barrier()
    with pytest.raises(kr.ConfigError, match=r"state\.npz is not a whole checkpoint"):
        fit(road, make(road), [kr.callbacks.Checkpoint(path)], epochs=1)
    assert kr.allgather_object(kr.rank()) == list(range(kr.size()))


@ROADS
def test_another_model_is_an_error_that_names_the_first_variable(road: str, tmp_path: Path) -> None:
    path = shared(tmp_path) / "state.npz"
    fit(road, make(road), [kr.callbacks.Checkpoint(path)], epochs=1)
    wider = make(road, units=5)
    before = wider.get_weights()
    with pytest.raises(
        kr.ConfigError,
        match=r"variable 0 .*/first/kernel', is float32 of shape \(3, 5\), and .*state\.npz has "
        r".*/first/kernel', float32 of shape \(3, 2\)",
    ):
        fit(road, wider, [kr.callbacks.Checkpoint(path)], epochs=2)
    for own, other in zip(before, wider.get_weights(), strict=True):
        np.testing.assert_array_equal(own, other)
    other = make(road, lambda: keras.optimizers.SGD(0.1))
    with pytest.raises(kr.ConfigError, match=r"have 6 variables, and .*state\.npz has 14"):
        fit(road, other, [kr.callbacks.Checkpoint(path)], epochs=2)


def test_what_cannot_go_on_is_refused_on_every_rank(tmp_path: Path) -> None:
    path, road = shared(tmp_path) / "state.npz", "optimizer"
    with pytest.raises(KilledError):
        fit(road, make(road), [kr.callbacks.Checkpoint(path, 3), Kill(4)])
    batch_size = 2 * JOINT_BATCH // kr.size()
    with pytest.raises(kr.ConfigError, match=r"after batch 3 of an epoch of 4, .* has 2 now"):
        fit(road, make(road), [kr.callbacks.Checkpoint(path, 3)], batch_size=batch_size)
    for every in (0, -1, True, "batch", 1.5):
        with pytest.raises(kr.ConfigError, match=r"every is .*; expected 'epoch' or a number"):
            kr.callbacks.Checkpoint(path, every)
    unbuilt = keras.Sequential([keras.layers.Dense(1)])
    unbuilt.compile(kr.DistributedOptimizer("sgd"), "mse")
    with pytest.raises(kr.ConfigError, match="is not built when training begins.*model.build"):
        fit(road, unbuilt, [kr.callbacks.Checkpoint(path)])
    if kr.size() > 1:
        with pytest.raises(kr.ConfigError, match=r"\{'every': 'epoch'\}, rank 1 has"):
            fit(road, make(road), [kr.callbacks.Checkpoint(path, kr.rank() or "epoch")])


def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    road, folder = "optimizer", shared(tmp_path)
    callback = kr.callbacks.Checkpoint(folder / "state.npz")
    if kr.rank() == 0:
        (folder / "state.npz.partial").mkdir()
    kr.barrier()
    with pytest.raises(kr.ConfigError, match=r"rank 0 cannot write .*state\.npz .*Make room"):
        fit(road, make(road), [callback], epochs=1)
    kr.barrier()
    if kr.rank() == 0:
        shutil.rmtree(folder / "state.npz.partial")


def test_loss_scale_metrics_that_are_no_means_and_validation_go_on(tmp_path: Path) -> None:
    path, road = shared(tmp_path) / "state.npz", "optimizer"
    x, y, _ = data(road)
    labels = (y > 0).astype("float32")

    def train(callbacks: list[Any]) -> tuple[Any, dict[str, list[float]]]:
        keras.utils.set_random_seed(1)
        dtype = keras.DTypePolicy("mixed_float16")
        inner = keras.optimizers.Adam(0.01)
        optimizer = keras.optimizers.LossScaleOptimizer(inner, 1024.0, dynamic_growth_steps=5)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, dtype=dtype)])
        model.compile(
            kr.DistributedOptimizer(optimizer),
            "mse",
            metrics=[keras.metrics.AUC(name="auc")],
            steps_per_execution=2,
        )
        given = {"batch_size": len(x) // 4, "epochs": 3, "verbose": 0}
        with contextlib.suppress(KilledError):
            model.fit(x, labels, validation_data=(x, labels), callbacks=callbacks, **given)
        return model, model.history.history

    whole, expected = train([])
    train([kr.callbacks.Checkpoint(path, 2), Kill(4)])
    again, history = train([kr.callbacks.Checkpoint(path, 2)])
    assert history.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_allclose(history[name], values, rtol=1e-5, err_msg=name)
    for own, other in zip(state_of(whole), state_of(again), strict=True):
        np.testing.assert_array_equal(own, other)
