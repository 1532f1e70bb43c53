"""Which samples are whose, and when: arithmetic on numbers, without data, ranks or TensorFlow.

An *order* lists the samples of an epoch, each once. It is drawn from the seed and the epoch and
from nothing else, so it is the same on all ranks, however many there are. A *plan* says which
places of the order make a rank's batches: as many batches on every rank, with as many rows.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Plan:
    """A rank's batches, as places in an order.

    Args:
        begin: The first sample of those that the order lists.
        end: The one behind the last.
        num_places: How many places of the order are used; more than there are samples if the first
            ones are repeated.
        rows: How many rows one batch has: of all ranks together, or of this rank alone if the order
            lists this rank's samples only.
        rank: Whose batches, of those that share the order.
        size: How many share it.
        is_striped: Whether a rank takes every `size`-th row of a batch; otherwise adjacent ones.
    """

    begin: int
    end: int
    num_places: int
    rows: int
    rank: int
    size: int
    is_striped: bool

    @property
    def num_batches(self) -> int:
        """How many batches an epoch has, on every rank."""
        return -(-self.num_places // self.rows)

    def places(self, index: int) -> Indices:
        """Return the places of a batch in the order, int64, of shape (rows of this rank,).

        Args:
            index: Which batch, from 0.
        """
        first = index * self.rows
        own = min(self.rows, self.num_places - first) // self.size
        if self.is_striped:
            places = first + self.rank + self.size * np.arange(own, dtype=np.int64)
        else:
            places = first + self.rank * own + np.arange(own, dtype=np.int64)
        return places % (self.end - self.begin)


def plan_random(
    num_samples: int, batch_size: int, rank: int, size: int, *, pads: bool, is_striped: bool
) -> Plan:
    """Return the plan by which the ranks share one order of all samples.

    Args:
        num_samples: How many there are; at least as many as ranks, if `pads`.
        batch_size: Rows of the joint batch, a multiple of `size`.
        rank: Whose plan.
        size: How many ranks.
        pads: Whether up to `size - 1` samples come twice, so that the last batch can be shared;
            otherwise only whole batches are used.
        is_striped: See `Plan`.
    """
    used = -(-num_samples // size) * size if pads else num_samples // batch_size * batch_size
    return Plan(0, num_samples, used, batch_size, rank, size, is_striped)


def plan_partition(num_samples: int, batch_size: int, rank: int, size: int, *, pads: bool) -> Plan:
    """Return the plan by which each rank has an order of its own adjacent samples.

    The parts differ by one sample at most. Arguments as of `plan_random`; with `pads` a shorter
    part has one of its samples twice.
    """
    begin, end = (r * num_samples // size for r in (rank, rank + 1))
    rows = batch_size // size
    used = -(-num_samples // size) if pads else num_samples // size // rows * rows
    return Plan(begin, end, used, rows, 0, 1, is_striped=False)


class Order:
    """The order of single samples.

    Args:
        num_samples: How many it lists.
        seed: What it is drawn from; None for the order in which they are stored.
        part: 0 for the order of all samples, 1 + rank for that of a rank's part.
    """

    def __init__(self, num_samples: int, seed: int | None, part: int = 0) -> None:
        self._num_samples = num_samples
        self._seed = seed
        self._part = part

    def of_epoch(self, epoch: int) -> Indices:
        """Return the samples, int64, of shape (number of samples,)."""
        if self._seed is None:
            return np.arange(self._num_samples, dtype=np.int64)
        order: Indices = generator(self._seed, epoch, self._part).permutation(self._num_samples)
        return order


class BlockOrder:
    """The order of samples that are stored in blocks: of the blocks, and within each of them.

    Args:
        bounds: Where blocks begin, and where the last one ends: ascending, at least two numbers.
        seed: As of `Order`.
        part: As of `Order`.
    """

    def __init__(self, bounds: Sequence[int], seed: int | None, part: int = 0) -> None:
        self._bounds = np.asarray(bounds, np.int64)
        self._seed = seed
        self._part = part

    def of_epoch(self, epoch: int) -> EpochOfBlocks:
        """Return the order of an epoch."""
        num_blocks = len(self._bounds) - 1
        blocks = Order(num_blocks, self._seed, self._part).of_epoch(epoch)
        lengths = np.diff(self._bounds)[blocks]
        key = None if self._seed is None else (self._seed, epoch, self._part)
        return EpochOfBlocks(blocks, np.concatenate([[0], np.cumsum(lengths)]), key)


@dataclasses.dataclass(frozen=True)
class EpochOfBlocks:
    """The order of one epoch.

    Args:
        blocks: The numbers of the blocks, as they come: int64, of shape (blocks,).
        starts: The place at which each begins, and the number of places: (blocks + 1,).
        key: What the orders within the blocks are drawn from; None if they are as stored.
    """

    blocks: Indices
    starts: Indices
    key: tuple[int, int, int] | None

    def runs(self, places: Indices) -> Iterator[tuple[int, Indices, slice]]:
        """Yield for places what is to be read for them.

        Args:
            places: int64, of shape (rows,).

        Yields:
            A block, which of its rows are wanted, and where among `places` they stand.
        """
        which = np.searchsorted(self.starts, places, side="right") - 1
        cuts = [0, *(np.flatnonzero(np.diff(which)) + 1).tolist(), len(places)]
        for begin, end in itertools.pairwise(cuts):
            if begin == end:
                continue
            turn = int(which[begin])
            block = int(self.blocks[turn])
            rows = places[begin:end] - self.starts[turn]
            if self.key is not None:
                length = int(self.starts[turn + 1] - self.starts[turn])
                rows = generator(*self.key, 1 + block).permutation(length)[rows]
            yield block, rows, slice(begin, end)


def generator(*key: int) -> Any:
    """Return NumPy's generator for a key: the same numbers on every machine and rank."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(key)))
