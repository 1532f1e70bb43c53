"""`shard`: this rank's batches of data, whatever it is kept in."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from keras_ring import runtime
from keras_ring.data import arrays, datasets, hdf5, py_dataset
from keras_ring.data.order import Order, Plan, plan_partition, plan_random
from keras_ring.errors import ConfigError
from keras_ring.fitting.agreement import Group, check_equal, share_error

_GROUP = Group(
    "kr.data.shard",
    "Every rank must call it, in the same order as other calls that all ranks make.",
    has_own_data=True,
)
_ROWS_PER_RANK = 32
_CHOICES = {"reading": ("random", "partition"), "remainder": ("pad", "drop")}


def shard(
    data: Any,
    reading: str = "random",
    *,
    seed: int | None = 0,
    remainder: str = "pad",
    batch_size: int | None = None,
) -> Any:
    """Return this rank's batches of data that all ranks are given.

    In an epoch each sample is used once, by one rank. Every rank has the same number of batches,
    with as many rows as the others' at the same time. Each epoch has another order. It comes of
    `seed` and the number of the epoch, and with `reading="random"` of nothing else: the rows that
    the ranks have at the same time are those of one joint batch, the same whatever the number of
    ranks.

    Args:
        data: One of

            - arrays of shape (samples, ...), in tuples, lists or dicts, such as `(x, y)`;
            - `keras_ring.data.HDF5`, read from its files when needed, by a thread beside training.
              Its order is one of blocks as large as a chunk, and one of samples within each;
            - a `tf.data.Dataset` that gives the same elements in the same order each time. For a
              random order it is read by every rank, and kept in memory while it is shuffled; each
              rank's part is, for a partition. One that does not know how many elements it has is
              counted first;
            - a `keras.utils.PyDataset` that does not shuffle. Its batches go to the ranks whole.
        reading: "random": one order of all samples, of which each rank takes its part of each joint
            batch. "partition": each rank reads only samples that are stored side by side, one rank
            after another, and shuffles those; of HDF5 files it reads no chunk that has none of
            them. Defaults to "random".
        seed: What the orders are drawn from, from 0 on; None to leave samples as they are stored.
            Defaults to 0.
        remainder: What is done with samples that do not make a whole batch for all ranks. "pad":
            the last batch is smaller, and less than one sample a rank is used twice. "drop": they
            are left out of this epoch. Defaults to "pad".
        batch_size: Rows of the joint batch of all ranks, a multiple of their number. Defaults to 32
            for each rank for arrays and HDF5. The elements of a `tf.data.Dataset` are samples if it
            is given, and batches that stay whole if not; those of a `PyDataset` always are.

    Returns:
        A `keras.utils.PyDataset`, or a `tf.data.Dataset` for one. `fit`, `evaluate` and `predict`
        take it, with a distributed optimizer and in the scope of a `RingStrategy`. Its attribute
        `epoch`, an int that can be set, says which order it is read in.

    Raises:
        ConfigError: An argument is wrong, the ranks were given different data or arguments, there
            are fewer samples than ranks, or, for "drop", than a batch has rows. See
            `keras_ring.data.HDF5` for files.
        MismatchError: Another rank's data is wrong.

    Collective: every rank calls it.
    Cost: One exchange of a few hundred bytes. Batches cost no communication.
    Thread: any.

    Example:
        >>> shard = kr.data.shard((np.zeros((10, 3)), np.arange(10)), batch_size=4)
        >>> [len(y) for x, y in shard]
        [4, 4, 2]
        >>> shard.epoch
        1
    """
    error: Exception | None = None
    source: _Source | None = None
    try:
        _check_arguments(reading, seed, remainder)
        source = _source_of(data, batch_size)
    except Exception as raised:  # noqa: BLE001 - the others are told of any
        error = raised
    own = {
        "data": None if source is None else source.same,
        "reading": reading,
        "seed": seed,
        "remainder": remainder,
        "batch_size": batch_size,
    }
    everyone = share_error(_GROUP, "shards data", error, own, where="where data is sharded")
    check_equal(
        _GROUP,
        "shards data",
        everyone,
        advice="Give every rank the whole data, the same, and the same arguments: shard takes each "
        "rank's part itself.",
    )
    if source is None:
        raise ConfigError("kr.data.shard: no data was found.")
    rows = _rows(source, batch_size)
    plan = _plan(source, rows, reading, pads=remainder == "pad")
    part = 0 if reading == "random" else 1 + runtime.rank()
    return source.make(plan, None if seed is None else int(seed), part)


class _Source:
    """Data of any kind, checked.

    Args:
        what: What it is, for messages.
        num_samples: How many samples, or whole batches, it has.
        same: What other ranks' data must be equal in.
        make: Returns a rank's batches by its plan, the seed and which part's order it is.
        is_batched: Whether its samples are batches already.
        is_striped: Whether a rank takes every size-th sample of a joint batch.
    """

    def __init__(
        self,
        what: str,
        num_samples: int,
        same: Any,
        make: Callable[[Plan, int | None, int], Any],
        *,
        is_batched: bool = False,
        is_striped: bool = True,
    ) -> None:
        self.what = what
        self.num_samples = num_samples
        self.same = same
        self.make = make
        self.is_batched = is_batched
        self.is_striped = is_striped


def _source_of(data: Any, batch_size: int | None) -> _Source:
    if isinstance(data, hdf5.HDF5):
        layout = hdf5.look_into(data)
        specs = [(shape, str(dtype)) for shape, dtype in layout.specs]
        names = ", ".join(path.name for path in layout.paths[:3])
        return _Source(
            f"HDF5 ({names}{', ...' if len(layout.paths) > 3 else ''}; dataset "
            f"{keras.tree.flatten(layout.names)[0]!r})",
            layout.num_samples,
            ["HDF5", layout.names, layout.bounds, specs, hash(tuple(layout.block_bounds))],
            lambda plan, seed, part: py_dataset.Shard(hdf5.HDF5Reader(layout, plan, seed, part)),
            # Adjacent rows are of one block: the fewer ranks read it.
            is_striped=False,
        )
    if isinstance(data, tf.data.Dataset):
        num_elements, same = datasets.check_dataset(data)
        is_batched = batch_size is None
        return _Source(
            "the tf.data.Dataset",
            num_elements,
            ["tf.data", num_elements, *same],
            lambda plan, seed, part: datasets.ShardedDataset(
                data, plan, seed, part, batches=not is_batched
            ),
            is_batched=is_batched,
        )
    if isinstance(data, keras.utils.PyDataset):
        num_batches = py_dataset.check_py_dataset(data)
        if batch_size is not None:
            raise ConfigError(
                f"kr.data.shard: batch_size={batch_size!r} was given with a PyDataset, whose "
                "batches have their size; expected None. Let the PyDataset make batches of as many "
                "rows as one rank shall have."
            )
        return _Source(
            f"the PyDataset {type(data).__name__}",
            num_batches,
            ["PyDataset", num_batches],
            lambda plan, seed, part: py_dataset.Shard(
                py_dataset.BatchReader(data, plan, _order(plan, seed, part))
            ),
            is_batched=True,
        )
    nest, num_samples, same = arrays.check_arrays(data)
    return _Source(
        "the data",
        num_samples,
        ["arrays", *same],
        lambda plan, seed, part: py_dataset.Shard(
            arrays.ArrayReader(nest, plan, _order(plan, seed, part))
        ),
    )


def _order(plan: Plan, seed: int | None, part: int) -> Order:
    return Order(plan.end - plan.begin, seed, part)


def _check_arguments(reading: str, seed: int | None, remainder: str) -> None:
    for name, value in (("reading", reading), ("remainder", remainder)):
        if value not in _CHOICES[name]:
            raise ConfigError(
                f"kr.data.shard: {name}={value!r}; expected one of "
                f"{', '.join(map(repr, _CHOICES[name]))}."
            )
    try:
        is_seed = seed is None or operator.index(seed) >= 0
    except TypeError:
        is_seed = False
    if not is_seed:
        raise ConfigError(
            f"kr.data.shard: seed={seed!r}; expected a whole number from 0 on, the same on every "
            "rank, or None to leave samples in the order in which they are stored."
        )


def _rows(source: _Source, batch_size: int | None) -> int:
    """Return how many samples a joint batch has."""
    size = runtime.size()
    if source.is_batched:
        return size
    if batch_size is None:
        return _ROWS_PER_RANK * size
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ConfigError(
            f"kr.data.shard: batch_size={batch_size!r}; expected a whole number of rows from 1 on."
        )
    if batch_size % size:
        raise ConfigError(
            f"kr.data.shard: batch_size={batch_size} is the size of the joint batch, and "
            f"{size} ranks cannot share it evenly; expected a multiple of {size}. "
            f"{max(1, batch_size // size) * size} is the nearest below or the least."
        )
    return batch_size


def _plan(source: _Source, rows: int, reading: str, *, pads: bool) -> Plan:
    rank, size, num_samples = runtime.rank(), runtime.size(), source.num_samples
    unit = "batches" if source.is_batched else "samples"
    if num_samples < size:
        raise ConfigError(
            f"kr.data.shard: {source.what} has {num_samples} {unit} for {size} ranks; expected one "
            "for each rank at least. Start fewer ranks, or give more data."
        )
    if reading == "random":
        plan = plan_random(num_samples, rows, rank, size, pads=pads, is_striped=source.is_striped)
    else:
        plan = plan_partition(num_samples, rows, rank, size, pads=pads)
    if plan.num_batches == 0:
        raise ConfigError(
            f'kr.data.shard: {source.what} has {num_samples} {unit}, and with remainder="drop" not '
            f'one batch of {rows} is left. Use remainder="pad" or a smaller batch_size.'
        )
    return plan
