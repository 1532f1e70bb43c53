"""Samples that are known by their numbers, in each kind of data that `kr.data.shard` takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np
import pytest
import tensorflow as tf

import keras_ring as kr

NUM_SAMPLES = 50
CHUNK = 4
# The least that 1, 2, 3 and 4 ranks can share.
BATCH = 12
KINDS = ["arrays", "tf.data", "tf.data of batches", "PyDataset", "HDF5"]


class Pairs(keras.utils.PyDataset):
    """Batches of up to 4 samples."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.asked_for: list[int] = []

    def __len__(self) -> int:
        return -(-NUM_SAMPLES // 4)

    def __getitem__(self, index: int) -> Any:
        self.asked_for.append(index)
        return samples()[0][index * 4 : index * 4 + 4], samples()[1][index * 4 : index * 4 + 4]


def samples(number: int = NUM_SAMPLES) -> tuple[np.ndarray, np.ndarray]:
    """Sample i is known by its target i."""
    numbers = np.arange(number, dtype="float32")
    return np.stack([numbers / number, np.sin(numbers)], axis=1), numbers


def flat(parts: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(parts))


def shared(tmp_path: Path) -> Path:
    return Path(kr.broadcast_object(str(tmp_path)))


def write(path: Path, begin: int, end: int, **options: Any) -> Path:
    if kr.rank() == 0:
        x, y = samples()
        with h5py.File(path, "w") as file:
            options = {"chunks": (CHUNK, 2), "compression": "gzip", **options}
            file.create_dataset("images", data=x[begin:end], **options)
            file.create_dataset("labels", data=y[begin:end])
    kr.barrier()
    return path


def data_of(kind: str, tmp_path: Path) -> tuple[Any, dict[str, Any]]:
    """The data, all of it, and what shard is called with."""
    if kind == "PyDataset":
        return Pairs(), {}
    if kind == "HDF5":
        folder = shared(tmp_path)
        paths = [write(folder / "a.h5", 0, 22), write(folder / "b.h5", 22, NUM_SAMPLES)]
        return kr.data.HDF5(paths), {"batch_size": BATCH}
    dataset = tf.data.Dataset.from_tensor_slices(samples())
    if kind == "tf.data of batches":
        return dataset.batch(4), {}
    return samples() if kind == "arrays" else dataset, {"batch_size": BATCH}


def targets(shard: Any) -> list[list[int]]:
    """The samples of each batch of an epoch."""
    return [np.asarray(y).astype(int).tolist() for _, y in shard]


def of_all_ranks(shard: Any) -> list[list[list[int]]]:
    return kr.allgather_object(targets(shard))


def joint(shard: Any) -> list[list[int]]:
    """The sets of samples that are used at the same time."""
    return [sorted(flat(step)) for step in zip(*of_all_ranks(shard), strict=True)]


def expect_error(match: str, call: Callable[[], Any]) -> None:
    """All ranks get the error, and may go on."""
    with pytest.raises(kr.ConfigError, match=match):
        call()
    kr.barrier()
