"""Datasets in HDF5 files, read through h5py when they are needed, in blocks as large as chunks."""

from __future__ import annotations

import collections
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import h5py
import keras
import numpy as np

from keras_ring.data.memory import Memory
from keras_ring.data.order import BlockOrder, EpochOfBlocks, Plan
from keras_ring.errors import ConfigError

_CONTIGUOUS_BLOCK_BYTES = 1 << 20
_NUM_OPEN_FILES = 32
_NUM_BLOCKS_KEPT = 2


class HDF5:
    """Samples in HDF5 files, for `keras_ring.data.shard`.

    Nothing is read, and no file opened, before that. A file is read in blocks of as many rows as a
    chunk has, each only by a rank that needs rows of it, by a thread beside training.

    Args:
        path: A file, or several whose samples follow one another.
        x: The name of the dataset of the inputs in each file, of shape (samples, ...); names in a
            tuple, list or dict for several inputs. Defaults to "images".
        y: That of the targets, likewise; None if there are none. Defaults to "labels".
        sample_weight: That of the weights of the samples. Defaults to None.

    Raises:
        ConfigError: There is no path. What is wrong with the files, `shard` raises.

    Example:
        >>> import tempfile, h5py
        >>> path = f"{tempfile.mkdtemp()}/train.h5"
        >>> with h5py.File(path, "w") as file:
        ...     file["images"], file["labels"] = np.zeros((6, 2)), np.arange(6)
        >>> shard = kr.data.shard(kr.data.HDF5(path), batch_size=4, seed=None)
        >>> [y.tolist() for x, y in shard]
        [[0, 1, 2, 3], [4, 5]]
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
        x: Any = "images",
        y: Any = "labels",
        *,
        sample_weight: str | None = None,
    ) -> None:
        paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        if not paths:
            raise ConfigError(
                "kr.data.HDF5: no path was given; expected one file at least. Does the pattern of "
                "the files' names match any?"
            )
        self.paths = [Path(one) for one in paths]
        if y is None and sample_weight is not None:
            raise ConfigError(
                f"kr.data.HDF5: sample_weight={sample_weight!r} was given and no y; expected the "
                "name of the targets, too."
            )
        self.names: Any = (x,) if y is None else (x, y)
        if sample_weight is not None:
            self.names = (x, y, sample_weight)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Where the samples of the files are.

    Args:
        paths: The files.
        names: The nest of the datasets' names.
        bounds: The first sample of each file, and the number of samples.
        block_bounds: The first sample of each block, and the number of samples. A block is of one
            file.
        specs: Shape of a sample and dtype of each dataset, in the order in which Keras flattens
            the names.
    """

    paths: list[Path]
    names: Any
    bounds: list[int]
    block_bounds: list[int]
    specs: list[tuple[tuple[int, ...], Any]]

    @property
    def num_samples(self) -> int:
        """How many samples the files have together."""
        return self.bounds[-1]

    def blocks_of(self, begin: int, end: int) -> list[int]:
        """Return the bounds of the blocks, or parts of blocks, from one sample to another."""
        inner = [bound for bound in self.block_bounds if begin < bound < end]
        return [begin, *inner, end]


def look_into(data: HDF5) -> Layout:
    """Open all files, and return where their samples are.

    Raises:
        ConfigError: A file is missing, truncated or no HDF5 file, or has no dataset of a name, or
            one whose length or samples do not fit the others.
    """
    names = keras.tree.flatten(data.names)
    bounds, block_bounds = [0], [0]
    specs: list[tuple[tuple[int, ...], Any]] = []
    for path in data.paths:
        with open_file(path) as file:
            parts = [_dataset(file, path, name) for name in names]
            length = len(parts[0])
            for name, part in zip(names, parts, strict=True):
                if len(part) != length:
                    raise ConfigError(
                        f"kr.data.HDF5: in {path} dataset {name!r} has {len(part)} samples and "
                        f"{names[0]!r} has {length}; expected as many. Write one row for each "
                        "sample to each of them."
                    )
            its_specs = [(part.shape[1:], part.dtype) for part in parts]
            specs = specs or its_specs
            for name, spec, its_spec in zip(names, specs, its_specs, strict=True):
                if spec != its_spec:
                    raise ConfigError(
                        f"kr.data.HDF5: dataset {name!r} has samples of shape {its_spec[0]}, "
                        f"{its_spec[1]}, in {path}, and of shape {spec[0]}, {spec[1]}, in "
                        f"{data.paths[0]}; expected the same in all files. Put only files together "
                        "that were written alike."
                    )
            rows = _rows_of_block(parts)
            block_bounds += [bounds[-1] + min(row + rows, length) for row in range(0, length, rows)]
            bounds.append(bounds[-1] + length)
    return Layout(data.paths, data.names, bounds, block_bounds, specs)


def open_file(path: Path) -> Any:
    """Open a file to read.

    Raises:
        ConfigError: There is none, or it is no whole HDF5 file.
    """
    try:
        return h5py.File(path, "r")
    except FileNotFoundError:
        raise ConfigError(
            f"kr.data.HDF5: there is no file {path} on this host. Check the path; every host needs "
            "the file."
        ) from None
    except OSError as error:
        reason = str(error)
        if "truncated" in reason:
            problem = "is truncated"
        elif "signature" in reason:
            problem = "is not an HDF5 file"
        else:
            problem = "cannot be opened"
        raise ConfigError(
            f"kr.data.HDF5: {path} {problem} ({reason}). Write or copy it anew."
        ) from error


def _dataset(file: Any, path: Path, name: str) -> Any:
    found = file.get(name) if isinstance(name, str) else None
    if isinstance(found, h5py.Dataset) and found.ndim > 0:
        return found
    names: list[str] = []
    file.visititems(
        lambda its_name, item: names.append(its_name) if isinstance(item, h5py.Dataset) else None
    )
    problem = "has no dataset" if found is None else "has no samples under"
    raise ConfigError(
        f"kr.data.HDF5: {path} {problem} {name!r}; it has {sorted(names) or 'none at all'}. Give "
        "the names of the datasets as x=, y= and sample_weight=."
    )


def _rows_of_block(parts: Sequence[Any]) -> int:
    """Return how many rows are read at once: a chunk's, of the dataset with the largest rows."""
    largest = max(parts, key=_row_bytes)
    if largest.chunks is not None:
        return int(largest.chunks[0])
    return int(max(1, _CONTIGUOUS_BLOCK_BYTES // max(1, _row_bytes(largest))))


def _row_bytes(part: Any) -> int:
    return int(np.prod(part.shape[1:], dtype=np.int64)) * int(part.dtype.itemsize)


class HDF5Reader:
    """A rank's batches of HDF5 files.

    Args:
        layout: Where samples are.
        plan: Which places of the order are this rank's.
        seed: What the order is drawn from.
        part: 0 for the order of all samples, 1 + rank for that of a rank's part.
    """

    num_threads = 1

    def __init__(self, layout: Layout, plan: Plan, seed: int | None, part: int) -> None:
        self._layout = layout
        self.plan = plan
        self._bounds = layout.blocks_of(plan.begin, plan.end)
        self._order = BlockOrder([bound - plan.begin for bound in self._bounds], seed, part)

    def loader(self, epoch: int) -> Callable[[int], Any]:
        """Return a function of the number of a batch: a nest of arrays (rows, ...).

        It is made for one thread that loads batch after batch: it keeps the last blocks.
        """
        order = self._order.of_epoch(epoch)
        blocks = _Blocks(self._layout, self._bounds)
        memory = Memory()
        return lambda index: self._load(order, blocks, memory, index)

    def _load(self, order: EpochOfBlocks, blocks: _Blocks, memory: Memory, index: int) -> Any:
        places = self.plan.places(index)
        parts = [memory.array((len(places), *shape), dtype) for shape, dtype in self._layout.specs]
        for block, rows, where in order.runs(places):
            for part, content in zip(parts, blocks.read(block), strict=True):
                if part.dtype == object:
                    part[where] = content[rows]
                else:
                    # With another mode NumPy would copy it all once more.
                    np.take(content, rows, axis=0, out=part[where], mode="clip")
        return keras.tree.pack_sequence_as(self._layout.names, parts)

    def on_epoch_begin(self) -> None:
        """Do nothing: files have no epochs."""

    def on_epoch_end(self) -> None:
        """Do nothing."""


class _Blocks:
    """The files, as far as they are open, and the blocks that were read last."""

    def __init__(self, layout: Layout, bounds: list[int]) -> None:
        self._layout = layout
        self._bounds = bounds
        self._names = keras.tree.flatten(layout.names)
        self._files: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._kept: collections.OrderedDict[int, list[Any]] = collections.OrderedDict()

    def read(self, block: int) -> list[Any]:
        """Return the rows of a block, of each dataset: arrays of shape (rows of the block, ...)."""
        if block in self._kept:
            self._kept.move_to_end(block)
            return self._kept[block]
        begin, end = self._bounds[block], self._bounds[block + 1]
        number = int(np.searchsorted(self._layout.bounds, begin, side="right")) - 1
        first = self._layout.bounds[number]
        file = self._file(number)
        # The memory of the block that is given up takes the new one, if it is as large.
        old = self._kept.popitem(last=False)[1] if len(self._kept) >= _NUM_BLOCKS_KEPT else []
        content = []
        for i, (name, (shape, dtype)) in enumerate(
            zip(self._names, self._layout.specs, strict=True)
        ):
            full = (end - begin, *shape)
            out = old[i] if old and old[i].shape == full else np.empty(full, dtype)
            try:
                if out.size:
                    file[name].read_direct(out, np.s_[begin - first : end - first])
            except (OSError, KeyError) as error:
                raise ConfigError(
                    f"kr.data.HDF5: in {self._layout.paths[number]} samples {begin - first} to "
                    f"{end - first - 1} of dataset {name!r} cannot be read ({error}). Write or "
                    "copy the file anew, and leave it unchanged during training."
                ) from error
            content.append(out)
        self._kept[block] = content
        return content

    def _file(self, number: int) -> Any:
        if number not in self._files:
            if len(self._files) >= _NUM_OPEN_FILES:
                self._files.popitem(last=False)[1].close()
            self._files[number] = open_file(self._layout.paths[number])
        self._files.move_to_end(number)
        return self._files[number]
