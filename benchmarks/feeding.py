"""Read an HDF5 file: as `fit` gets it from `kr.data.shard`, and by h5py, from its begin to its end.

The file is in the page cache, as a first round reads it: what counts is what is done besides the
disk's own work.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

ROWS, SHAPE, ROWS_OF_CHUNK = 2048, (64, 64, 3), 32


def write(path: Path, compression: str | None) -> None:
    """Write 96 MiB of float32 images, which a codec makes about half as large, and labels."""
    import h5py

    images = np.random.default_rng(0).integers(0, 256, (ROWS, *SHAPE)).astype(np.float32)
    with h5py.File(path, "w") as file:
        chunks = (ROWS_OF_CHUNK, *SHAPE)
        file.create_dataset("images", data=images, chunks=chunks, compression=compression)
        file.create_dataset("labels", data=np.arange(ROWS), chunks=(ROWS_OF_CHUNK,))


def feed(library: Any, best_seconds: Any, compression: str | None, reading: str) -> float:
    """Seconds of one epoch of the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.h5"
        write(path, compression)
        run = by_h5py(path) if library.name == "h5py" else by_shard(library.library, path, reading)
        return float(best_seconds(run, library, 1))


def by_h5py(path: Path) -> Any:
    """Read chunk after chunk, into new memory each."""
    import h5py

    def run() -> None:
        with h5py.File(path) as file:
            images, labels = file["images"], file["labels"]
            for row in range(0, ROWS, ROWS_OF_CHUNK):
                _ = images[row : row + ROWS_OF_CHUNK], labels[row : row + ROWS_OF_CHUNK]

    return run


def by_shard(kr: Any, path: Path, reading: str) -> Any:
    """Go through the tf.data.Dataset that Keras makes of a shard."""
    from keras.src.trainers.data_adapters import get_data_adapter

    shard = kr.data.shard(kr.data.HDF5(path), reading, batch_size=ROWS_OF_CHUNK)
    dataset = get_data_adapter(shard).get_tf_dataset()

    def run() -> None:
        for _ in dataset:
            pass

    return run
