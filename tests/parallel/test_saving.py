"""Models trained by several ranks are saved, loaded, copied and trained on."""

from __future__ import annotations

import copy
import functools
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

import keras_ring as kr
from keras_ring import reducer

FEATURES, BATCH, STEPS = 4, 2, 6
KERAS = tuple(int(part) for part in keras.__version__.split(".")[:2])
needs_copies = pytest.mark.skipif(KERAS < (3, 5), reason="this Keras cannot copy a model")
ATOL = 1e-5
# By its name, Keras 3 does not load it from a .h5 file.
LOSS = keras.losses.MeanSquaredError()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Rank 0's folder, known to all."""
    return kr.broadcast_object(tmp_path)


def build() -> Any:
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input((FEATURES,)),
            keras.layers.Dense(5, activation="tanh"),
            keras.layers.Dense(1),
        ]
    )


def make_data() -> tuple[np.ndarray, np.ndarray]:
    """Samples by step and rank, so that steps can be taken apart."""
    random = np.random.default_rng(4)
    x = random.normal(size=(STEPS, kr.size(), BATCH, FEATURES)).astype("float32")
    return x, x.sum(-1, keepdims=True)


def fit(model: Any, steps: slice, *, callbacks: Any = None) -> None:
    x, y = make_data()
    model.fit(
        x[steps, kr.rank()].reshape(-1, FEATURES),
        y[steps, kr.rank()].reshape(-1, 1),
        batch_size=BATCH,
        shuffle=False,
        verbose=0,
        callbacks=callbacks,
    )


@functools.cache
def train_without_interruption() -> Any:
    """One process, joint batches, plain optimizer."""
    x, y = make_data()
    model = build()
    model.compile(keras.optimizers.Adam(0.05), LOSS, run_eagerly=True)
    model.fit(
        x.reshape(-1, FEATURES),
        y.reshape(-1, 1),
        batch_size=BATCH * kr.size(),
        shuffle=False,
        verbose=0,
    )
    return model


def train_half() -> Any:
    model = build()
    model.compile(kr.DistributedOptimizer(keras.optimizers.Adam(0.05)), LOSS, run_eagerly=True)
    fit(model, slice(0, 3))
    return model


def assert_equals_uninterrupted(model: Any) -> None:
    oracle = train_without_interruption()
    optimizer = getattr(model.optimizer, "inner_optimizer", model.optimizer)
    assert int(optimizer.iterations.numpy()) == STEPS
    for mine, expected in zip(model.get_weights(), oracle.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, atol=ATOL)


def save_on_rank_0(model: Any, path: Path) -> None:
    if kr.rank() == 0:
        model.save(path)
    kr.barrier()


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
@pytest.mark.parametrize("suffix", [".keras", ".h5"])
def test_loaded_model_continues_as_if_uninterrupted(folder: Path, suffix: str) -> None:
    model = train_half()
    path = folder / f"model{suffix}"
    save_on_rank_0(model, path)

    loaded = kr.load_model(path)
    assert reducer.is_distributed(loaded.optimizer)
    for mine, saved in zip(loaded.optimizer.variables, model.optimizer.variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), saved.numpy())
    fit(loaded, slice(3, 6))

    assert_equals_uninterrupted(loaded)


def test_loading_on_rank_0_and_broadcasting_continues_as_if_uninterrupted(folder: Path) -> None:
    path = folder / "model.keras"
    save_on_rank_0(train_half(), path)

    if kr.rank() == 0:
        model = kr.load_model(path)
    else:
        model = build()
        model.compile(kr.DistributedOptimizer(keras.optimizers.Adam(0.1)), LOSS, run_eagerly=True)
    fit(model, slice(3, 6), callbacks=[kr.callbacks.BroadcastInitialWeights()])

    assert_equals_uninterrupted(model)


def test_save_weights_on_rank_0_is_restored_by_all(folder: Path) -> None:
    model = train_half()
    path = folder / "model.weights.h5"
    if kr.rank() == 0:
        model.save_weights(path)
    kr.barrier()

    restored = build()
    restored.compile(kr.DistributedOptimizer(keras.optimizers.Adam(0.05)), LOSS, run_eagerly=True)
    restored.optimizer.build(restored.trainable_variables)
    restored.load_weights(path)
    fit(restored, slice(3, 6))

    assert_equals_uninterrupted(restored)


@pytest.mark.skipif(KERAS < (3, 5), reason="this Keras cannot save it")
def test_loss_scale_and_state_in_h5_are_kept(folder: Path) -> None:
    model = build()
    scaled = keras.optimizers.LossScaleOptimizer(
        keras.optimizers.Adam(0.05), initial_scale=2.0**7, dynamic_growth_steps=2
    )
    model.compile(kr.DistributedOptimizer(scaled), LOSS, run_eagerly=True)
    fit(model, slice(0, 3))
    save_on_rank_0(model, folder / "scaled.h5")

    loaded = kr.load_model(folder / "scaled.h5")
    for mine, saved in zip(loaded.optimizer.variables, scaled.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), saved.numpy())
    fit(loaded, slice(3, 6))

    assert_equals_uninterrupted(loaded)
    assert float(loaded.optimizer.dynamic_scale.numpy()) == 2.0**10


PLAIN = """
import sys
sys.modules["keras_ring"] = None  # importing it fails
import keras
for path in sys.argv[1:]:
    model = keras.saving.load_model(path)
    total = sum(abs(w).sum() for w in model.get_weights())
    print(type(model.optimizer).__name__, int(model.optimizer.iterations.numpy()), float(total))
"""


@pytest.mark.filterwarnings("ignore:You are saving your model as an HDF5")
def test_files_load_in_plain_keras_without_keras_ring(tmp_path: Path) -> None:
    model = train_half()
    if kr.rank() != 0:
        return
    paths = [str(tmp_path / name) for name in ("model.keras", "model.h5")]
    for path in paths:
        model.save(path)

    result = subprocess.run(
        [sys.executable, "-c", PLAIN, *paths],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )

    assert result.returncode == 0, result.stderr
    expected = sum(np.abs(w).sum() for w in model.get_weights())
    for line in result.stdout.splitlines()[-2:]:
        optimizer, iterations, total = line.split()
        assert (optimizer, iterations) == ("Adam", "3")
        np.testing.assert_allclose(float(total), expected, rtol=1e-5)


def test_model_saved_by_plain_keras_loads_distributed(folder: Path) -> None:
    model = build()
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    save_on_rank_0(model, folder / "plain.keras")

    loaded = kr.load_model(folder / "plain.keras", op="sum")
    uncompiled = kr.load_model(folder / "plain.keras", compile=False)

    assert reducer.reducer_of(loaded.optimizer).reduction.op == "sum"
    assert getattr(uncompiled, "optimizer", None) is None


@needs_copies
@pytest.mark.parametrize(
    "copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"]
)
def test_copy_of_a_model_trains_distributed(copy_of: Any) -> None:
    copied = copy_of(train_half())
    fit(copied, slice(3, 6))

    assert reducer.is_distributed(copied.optimizer)
    assert_equals_uninterrupted(copied)


@needs_copies
def test_copy_of_an_optimizer_is_distributed_and_another_one() -> None:
    optimizer = kr.DistributedOptimizer(keras.optimizers.SGD(0.25), op="sum")

    copied = copy.deepcopy(optimizer)

    assert copied is not optimizer
    assert reducer.reducer_of(copied).reduction.op == "sum"
    assert reducer.reducer_of(copied) is not reducer.reducer_of(optimizer)
    np.testing.assert_allclose(copied.learning_rate.numpy(), 0.25)


@needs_copies
def test_copy_of_a_plain_model_stays_plain() -> None:
    kr.DistributedOptimizer("sgd")
    model = build()
    model.compile("sgd", "mse", run_eagerly=True)

    assert not reducer.is_distributed(copy.deepcopy(model).optimizer)
