"""A checkpoint's file: whole or not there, whenever the process that writes it is killed.

An archive of NumPy arrays (.npz), each with a checksum, and one text in JSON. It needs no pickle,
so that a file from elsewhere runs no code.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
import zlib
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from keras_ring.errors import ConfigError

Array = npt.NDArray[Any]

_FORMAT = "keras_ring checkpoint"
_VERSION = 1
_TEXT = "state"


class Content(NamedTuple):
    """What a file holds.

    Args:
        state: Anything that JSON can hold.
        arrays: By name.
    """

    state: dict[str, Any]
    arrays: dict[str, Array]


def write(path: Path, content: Content) -> None:
    """Replace a file in one step: until then the old one stays, and it is on the disk afterwards.

    Args:
        path: The file; its folder is made.
        content: What to write.

    Raises:
        OSError: It cannot be written; the old one is still there.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    # One name, so that what a killed process has left is written over.
    partial = path.with_name(path.name + ".partial")
    dtypes = {name: array.dtype.name for name, array in content.arrays.items()}
    text = json.dumps(
        {"format": _FORMAT, "version": _VERSION, "dtypes": dtypes, "state": content.state}
    )
    arrays = {name: _storable(array) for name, array in content.arrays.items()}
    arrays[_TEXT] = np.frombuffer(text.encode(), np.uint8)
    try:
        with partial.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read(path: Path) -> Content | None:
    """Return what a file holds, all of it checked; None if there is no file.

    Args:
        path: The file.

    Raises:
        ConfigError: It is not a checkpoint, or not a whole one, or cannot be read.
    """
    remedy = "Remove it to begin anew, or bring back a copy of it."
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        head = json.loads(arrays.pop(_TEXT).tobytes())
        if head["format"] != _FORMAT or head["version"] != _VERSION:
            raise ConfigError(
                f"Checkpoint: {path} is of format {head['format']!r}, version {head['version']}; "
                f"expected {_FORMAT!r}, version {_VERSION}. {remedy}"
            )
        dtypes = {name: tf.as_dtype(dtype) for name, dtype in head["dtypes"].items()}
        return Content(
            head["state"],
            {name: array.view(dtypes[name].as_numpy_dtype) for name, array in arrays.items()},
        )
    except FileNotFoundError:
        return None
    except ConfigError:
        raise
    except (
        OSError,
        EOFError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        NotImplementedError,
        zipfile.BadZipFile,
        zlib.error,
    ) as error:
        raise ConfigError(
            f"Checkpoint: {path} is not a whole checkpoint of keras_ring "
            f"({type(error).__name__}: {error}). {remedy}"
        ) from error


def _storable(array: Array) -> Array:
    """NumPy's files know no bfloat16 and the like: store the bits."""
    if array.dtype.kind in "biufc":
        return array
    return array.view(np.dtype(f"u{array.dtype.itemsize}"))
