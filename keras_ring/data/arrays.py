"""Nests of arrays in memory: their samples, and a rank's batches of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from keras_ring.data.order import Order, Plan
from keras_ring.errors import ConfigError

_NUM_DIGESTED = 64


class ArrayReader:
    """A rank's batches of arrays.

    Args:
        data: The nest; see `check_arrays`.
        plan: Which places of the order are this rank's.
        order: The order of the samples from `plan.begin` on.
    """

    num_threads = 0

    def __init__(self, data: Any, plan: Plan, order: Order) -> None:
        self._data = data
        self.plan = plan
        self._order = order

    def loader(self, epoch: int) -> Callable[[int], Any]:
        """Return a function of the number of a batch: a nest of arrays (rows, ...)."""
        samples = self._order.of_epoch(epoch)

        def load(index: int) -> Any:
            own = self.plan.begin + samples[self.plan.places(index)]
            return keras.tree.map_structure(lambda part: part[own], self._data)

        return load

    def on_epoch_begin(self) -> None:
        """Do nothing: arrays have no epochs."""

    def on_epoch_end(self) -> None:
        """Do nothing."""


def check_arrays(data: Any) -> tuple[Any, int, list[Any]]:
    """Return a nest of arrays with one length.

    Args:
        data: Arrays of shape (samples, ...), or what NumPy makes arrays of, in tuples, lists and
            dicts.

    Returns:
        The nest of arrays, the number of samples, and what other ranks' data must be equal in.

    Raises:
        ConfigError: One is no array of samples, or they have different lengths.
    """
    names = [name for name, _ in _named(data, "data")]
    data = keras.tree.map_structure(np.asarray, data)
    parts = keras.tree.flatten(data)
    if not parts:
        raise ConfigError("kr.data.shard: the data has no array at all; expected one at least.")
    for name, part in zip(names, parts, strict=True):
        if part.ndim == 0 or part.dtype == object:
            raise ConfigError(
                f"kr.data.shard: {name} is {_describe(part)}; expected an array of numbers or "
                "texts with a first axis of samples. Pass arrays, a tf.data.Dataset, a "
                "keras.utils.PyDataset or kr.data.HDF5."
            )
        if len(part) != len(parts[0]):
            raise ConfigError(
                f"kr.data.shard: {name} has {len(part)} samples and {names[0]} has "
                f"{len(parts[0])}; expected arrays of one length. Pass arrays that belong together."
            )
    same = [(name, part.shape, str(part.dtype)) for name, part in zip(names, parts, strict=True)]
    return data, len(parts[0]), [*same, _digest(parts)]


def _named(data: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of a nest with names, in the order in which Keras flattens it."""
    if isinstance(data, dict):
        for key in sorted(data):
            yield from _named(data[key], f"{name}[{key!r}]")
    elif isinstance(data, (tuple, list)):
        for number, part in enumerate(data):
            yield from _named(part, f"{name}[{number}]")
    else:
        yield name, data


def _describe(part: Any) -> str:
    if part.ndim == 0:
        return f"a single {type(part.item()).__name__}"
    return "an array of Python objects"


def _digest(parts: list[Any]) -> str:
    """Return what tells data from other data: a digest of some rows, the same on all machines."""
    digest = hashlib.sha256()
    for part in parts:
        which = np.linspace(0, len(part) - 1, min(len(part), _NUM_DIGESTED)).astype(np.int64)
        digest.update(np.ascontiguousarray(part[which]).tobytes())
    return digest.hexdigest()[:12]
