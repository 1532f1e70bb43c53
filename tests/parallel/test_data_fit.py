"""Training on what `kr.data.shard` returns, both ways: as one process on the joint batches."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

sys.path.insert(0, str(Path(__file__).parent))
from data_samples import BATCH, NUM_SAMPLES, flat, samples, shared


def compiled(scope: bool) -> Any:
    keras.utils.set_random_seed(1)

    def make() -> Any:
        model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
        optimizer: Any = keras.optimizers.SGD(0.05)
        if not scope:
            optimizer = kr.DistributedOptimizer(optimizer)
        model.compile(optimizer, "mse")
        return model

    if not scope:
        return make()
    with kr.RingStrategy().scope():
        return make()


def alone(batches: list[list[int]]) -> Any:
    """The weights of one process that trains on joint batches."""
    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    x, y = samples()
    for batch in batches:
        model.train_on_batch(x[batch], y[batch] / NUM_SAMPLES)
    return model


class Scaled(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        x, y = samples()
        return x[index * 4 : index * 4 + 4], y[index * 4 : index * 4 + 4] / NUM_SAMPLES


def scaled(kind: str, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """48 samples whose targets are less than 1."""
    x, y = (part[:48] for part in samples())
    y = y / NUM_SAMPLES
    if kind == "PyDataset":
        return Scaled(), {}
    if kind == "HDF5":
        path = shared(tmp_path) / "scaled.h5"
        if kr.rank() == 0:
            with h5py.File(path, "w") as file:
                file.create_dataset("images", data=x, chunks=(5, 2))
                file["labels"] = y
        kr.barrier()
        return kr.data.HDF5(path), {"batch_size": BATCH}
    dataset = tf.data.Dataset.from_tensor_slices((x, y))
    return ((x, y) if kind == "arrays" else dataset), {"batch_size": BATCH}


@pytest.mark.parametrize("scope", [False, True], ids=["optimizer", "strategy"])
@pytest.mark.parametrize("kind", ["arrays", "tf.data", "PyDataset", "HDF5"])
def test_fit_trains_as_one_process_on_the_joint_batches(kind, scope, tmp_path):
    data, options = scaled(kind, tmp_path)
    shard = kr.data.shard(data, **options)
    batches = []
    for _ in range(2):
        ranks = kr.allgather_object(
            [np.rint(np.asarray(y) * NUM_SAMPLES).astype(int).tolist() for _, y in shard]
        )
        batches += [flat(step) for step in zip(*ranks, strict=True)]
    shard = kr.data.shard(data, **options)
    model = compiled(scope)
    history = model.fit(shard, epochs=2, verbose=0).history
    assert len(history["loss"]) == 2
    assert shard.epoch == 2
    for mine, expected in zip(model.get_weights(), alone(batches).get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-4, atol=1e-5)
    assert np.isfinite(model.evaluate(shard, verbose=0))


@pytest.mark.parametrize("scope", [False, True], ids=["optimizer", "strategy"])
@pytest.mark.parametrize("kind", ["arrays", "tf.data"])
def test_training_that_goes_on_ends_as_unbroken_training_does(kind, scope, tmp_path):
    """Also with an epoch of one batch, which Keras reads once more to build the model."""
    data, _ = scaled(kind, tmp_path)
    unbroken = compiled(scope)
    unbroken.fit(kr.data.shard(data, batch_size=48), epochs=3, verbose=0)
    model = compiled(scope)
    shard = kr.data.shard(data, batch_size=48)
    model.fit(shard, epochs=1, verbose=0)
    again = kr.data.shard(data, batch_size=48)
    again.epoch = 1
    model.fit(again, initial_epoch=1, epochs=3, verbose=0)
    assert again.epoch == 3
    for mine, expected in zip(model.get_weights(), unbroken.get_weights(), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=1e-5, atol=1e-6)


def test_fit_takes_class_weights_validation_data_and_uneven_last_batches():
    x, y = samples(46)
    model = compiled(scope=True)
    shard = kr.data.shard((x, (y % 2).astype("int64")), batch_size=BATCH)
    history = model.fit(
        shard,
        validation_data=kr.data.shard((x, y), seed=None, batch_size=BATCH),
        class_weight={0: 1.0, 1: 2.0},
        epochs=2,
        verbose=0,
    ).history
    assert set(history) == {"loss", "val_loss"}
