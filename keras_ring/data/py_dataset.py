"""What a rank reads batches from, `Shard`, and batches of a user's `keras.utils.PyDataset`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from keras.src.trainers.data_adapters.py_dataset_adapter import PyDatasetAdapter

from keras_ring.data.order import Order, Plan
from keras_ring.data.prefetch import read_ahead
from keras_ring.errors import ConfigError
from keras_ring.fitting.hooks import hook_method

# The attribute by which hooks know what `shard` returns.
IS_SHARD = "_keras_ring_shard"
_DEPTH = 3
_DEPTH_OF_TF = 1


class Reader(Protocol):
    """A rank's batches, whatever they are read from."""

    num_threads: int
    plan: Plan

    def loader(self, epoch: int) -> Callable[[int], Any]:
        """Return a function that loads a batch of an epoch by its number."""

    def on_epoch_begin(self) -> None:
        """Called when Keras begins an epoch."""

    def on_epoch_end(self) -> None:
        """Called when Keras ends an epoch."""


class Shard(keras.utils.PyDataset):
    """A rank's batches, made by `keras_ring.data.shard`.

    `fit`, `evaluate` and `predict` take it on every rank. In a loop of one's own it is iterated
    over, once for each epoch. Each pass to the end is followed by one in another order.

    Args:
        reader: Where batches come from.
    """

    _keras_ring_shard = True

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader
        self._epoch = 0
        # Of the pass that begins next: data may be read to the end before it is trained on.
        self._next_epoch = 0
        # A pass that was begun before the epoch was set does not count.
        self._counted = object()
        self._random_access: tuple[int, Callable[[int], Any]] | None = None

    @property
    def epoch(self) -> int:
        """Which epoch this is: what the order is drawn from, beside the seed. Defaults to 0.

        It grows by one with each epoch that is read to its end. Set it before `fit` to go on as
        training that was interrupted would have.
        """
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch = self._next_epoch = check_epoch(value)
        self._counted = object()

    @property
    def num_batches(self) -> int:
        """How many batches an epoch has, on every rank."""
        return self._reader.plan.num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> Any:
        """Return a batch of this epoch: arrays of shape (rows of this rank, ...)."""
        if not 0 <= index < self.num_batches:
            raise IndexError(f"batch {index} of {self.num_batches}")
        if self._random_access is None or self._random_access[0] != self._epoch:
            self._random_access = (self._epoch, self._reader.loader(self._epoch))
        return self._random_access[1](index)

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of an epoch, read ahead in the background."""
        self._reader.on_epoch_begin()
        yield from self._one_pass()
        self._reader.on_epoch_end()
        self._epoch = self._next_epoch

    def on_epoch_begin(self) -> None:
        """Called by Keras."""
        self._reader.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Called by Keras, before the first epoch, too."""
        self._reader.on_epoch_end()
        self._epoch = self._next_epoch

    def _one_pass(self) -> Iterator[Any]:
        epoch = self._epoch = self._next_epoch
        counted = self._counted
        threads = self._reader.num_threads
        batches = read_ahead(
            self._reader.loader(epoch),
            self.num_batches,
            num_threads=threads,
            depth=max(_DEPTH, threads),
        )
        for index, batch in enumerate(batches):
            if index == self.num_batches - 1 and self._counted is counted:
                self._next_epoch = epoch + 1
            yield batch

    def as_dataset(self, standardize: Callable[[Any], Any]) -> Any:
        """Return the batches as a `tf.data.Dataset` that says that it is this rank's own.

        Args:
            standardize: What Keras does to a batch.
        """

        def batches() -> Iterator[Any]:
            for batch in self._one_pass():
                yield standardize(batch)

        # The last batch may have fewer rows than the first; a user's second, other shapes.
        numbers = sorted({0, min(1, self.num_batches - 1)})
        spec = _spec([standardize(self[number]) for number in numbers])
        dataset = tf.data.Dataset.from_generator(batches, output_signature=spec)
        return as_own(dataset.prefetch(_DEPTH_OF_TF), self.num_batches)


class BatchReader:
    """A rank's batches of a user's PyDataset, which stay as they are.

    Args:
        data: The PyDataset.
        plan: Which places of the order are this rank's, one a batch.
        order: The order of the batches from `plan.begin` on.
    """

    def __init__(self, data: Any, plan: Plan, order: Order) -> None:
        self._data = data
        self.plan = plan
        self._order = order
        self.num_threads = max(1, data.workers)

    def loader(self, epoch: int) -> Callable[[int], Any]:
        """Return a function of the number of a batch: what the PyDataset has there."""
        batches = self._order.of_epoch(epoch)

        def load(index: int) -> Any:
            (place,) = self.plan.places(index)
            return self._data[int(self.plan.begin + batches[place])]

        return load

    def on_epoch_begin(self) -> None:
        """Tell the user's PyDataset."""
        self._data.on_epoch_begin()

    def on_epoch_end(self) -> None:
        """Tell the user's PyDataset."""
        self._data.on_epoch_end()


def check_py_dataset(data: Any) -> int:
    """Return how many batches a PyDataset has.

    Raises:
        ConfigError: It is infinite, sharded already, or wants processes.
    """
    name = type(data).__name__
    if isinstance(data, Shard):
        raise ConfigError(
            "kr.data.shard: the data is a shard already; expected the whole data on every rank. "
            "Call it once."
        )
    if data.num_batches is None:
        raise ConfigError(
            f"kr.data.shard: the PyDataset {name} is infinite; expected a number of batches. "
            "Let its num_batches return one."
        )
    if data.use_multiprocessing:
        raise ConfigError(
            f"kr.data.shard: the PyDataset {name} has use_multiprocessing=True, and a rank starts "
            "no processes: they would inherit its connections. Give it workers=N, which are "
            "threads, or start more ranks."
        )
    return int(data.num_batches)


def check_epoch(value: Any) -> int:
    """Return the number of an epoch.

    Raises:
        ConfigError: It is none.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
        raise ConfigError(
            f"kr.data: epoch was set to {value!r}; expected a whole number from 0 on, such as the "
            "initial_epoch of fit."
        )
    return int(value)


def as_own(dataset: Any, num_batches: int) -> Any:
    """Say of a dataset that it is this rank's own, and how many batches it has."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    counted = dataset.apply(tf.data.experimental.assert_cardinality(num_batches))
    return counted.with_options(options)


def _spec(batches: list[Any]) -> Any:
    """Return the `tf.TensorSpec`s of batches, with the dimensions that they have in common."""

    def spec(*parts: Any) -> Any:
        shapes = [np.shape(part) for part in parts]
        dtype = tf.as_dtype(getattr(parts[0], "dtype", None) or np.asarray(parts[0]).dtype)
        if len({len(shape) for shape in shapes}) > 1:
            return tf.TensorSpec(None, dtype)
        dims = [d[0] if len(set(d)) == 1 else None for d in zip(*shapes, strict=True)]
        return tf.TensorSpec([None, *dims[1:]] if dims else [], dtype)

    return tf.nest.map_structure(spec, *batches)


def _get_tf_dataset(plain: Callable[..., Any], self: Any) -> Any:
    """Let Keras take a shard's batches as they come: it would shuffle them, on each rank anew."""
    if not isinstance(self.py_dataset, Shard):
        return plain(self)
    return self.py_dataset.as_dataset(self._standardize_batch)


def _maybe_symbolic_build(
    plain: Callable[..., Any], self: Any, iterator: Any = None, data_batch: Any = None
) -> None:
    """Do not count as an epoch the batch from which Keras builds a model."""
    adapter = getattr(iterator, "data_adapter", None)
    data: Any = getattr(adapter, "py_dataset", getattr(adapter, "_dataset", None))
    epoch = data.epoch if hasattr(data, IS_SHARD) else None
    plain(self, iterator=iterator, data_batch=data_batch)
    if epoch is not None:
        data.epoch = epoch


hook_method(trainer.TensorFlowTrainer, "_maybe_symbolic_build", _maybe_symbolic_build)
hook_method(PyDatasetAdapter, "get_tf_dataset", _get_tf_dataset)
