"""A rank's batches of a `tf.data.Dataset`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops

from keras_ring.data.order import Plan, generator
from keras_ring.data.py_dataset import as_own, check_epoch
from keras_ring.errors import ConfigError


class ShardedDataset(dataset_ops.UnaryUnchangedStructureDataset):
    """A rank's batches, made by `keras_ring.data.shard` of a `tf.data.Dataset`.

    Args:
        data: The whole dataset.
        plan: Which elements are this rank's.
        seed: What the order is drawn from; None for the dataset's own.
        part: 0 for the order of all elements, 1 + rank for that of a rank's part.
        batches: Whether the elements are put together to batches.
    """

    _keras_ring_shard = True

    def __init__(
        self, data: Any, plan: Plan, seed: int | None, part: int, *, batches: bool
    ) -> None:
        self._epoch = 0
        num_batches = plan.num_batches

        def begin() -> Any:
            key = (seed or 0, self._epoch, part)
            return np.array([self._epoch, *generator(*key).integers(1, 2**62, 2)], np.int64)

        def end(epoch: Any) -> Any:
            self._epoch = int(epoch) + 1
            return np.array(True)

        def one_pass(_: Any) -> Any:
            numbers = tf.ensure_shape(tf.numpy_function(begin, [], tf.int64), [3])
            own = _own_elements(data, plan, None if seed is None else numbers[1:])
            own = own.batch(plan.rows // plan.size) if batches else own
            return own.prefetch(1).enumerate().map(_at_last(num_batches, end, numbers[0]))

        result = as_own(tf.data.Dataset.range(1).flat_map(one_pass), num_batches)
        options = tf.data.Options()
        # Read ahead below, as far as tf.data likes, and not above of where the epoch is counted.
        options.experimental_optimization.inject_prefetch = False
        result = result.with_options(options)
        super().__init__(result, result._variant_tensor)

    @property
    def epoch(self) -> int:
        """Which epoch is read next, or being read: what the order is drawn from, beside the seed.

        It grows by one when the last batch is read. Set it before `fit` to go on as training that
        was interrupted would have.
        """
        return self._epoch

    @epoch.setter
    def epoch(self, value: int) -> None:
        self._epoch = check_epoch(value)


def _own_elements(data: Any, plan: Plan, seeds: Any) -> Any:
    """Return the elements that a plan gives a rank."""
    num_own = plan.end - plan.begin
    if plan.begin or int(data.cardinality()) != num_own:
        data = data.skip(plan.begin).take(num_own)
    own = data if seeds is None else _shuffled(data, num_own, seeds)
    if plan.num_places > num_own:
        # Not from the shuffled: it would be read and shuffled anew for a few elements.
        own = own.concatenate(data.take(plan.num_places - num_own))
    elif plan.num_places < num_own:
        own = own.take(plan.num_places)
    return own.shard(plan.size, plan.rank) if plan.size > 1 else own


def _shuffled(data: Any, num_samples: int, seeds: Any) -> Any:
    """Return all elements in an order that comes of the seeds alone.

    `Dataset.shuffle` would mix in what `tf.random.set_seed` was given, and that may be another
    number on each rank.
    """
    variant = tf.raw_ops.ShuffleDataset(
        input_dataset=data._variant_tensor,
        buffer_size=tf.constant(num_samples, tf.int64),
        seed=seeds[0],
        seed2=seeds[1],
        reshuffle_each_iteration=False,
        **data._flat_structure,
    )
    return dataset_ops._VariantDataset(variant, data.element_spec)


def _at_last(num_batches: int, end: Callable[[Any], Any], epoch: Any) -> Callable[..., Any]:
    """Return a function of batches that calls `end` with the last."""

    def pass_on(index: Any, batch: Any) -> Any:
        is_last = tf.equal(index, num_batches - 1)
        noted = tf.cond(
            is_last,
            lambda: tf.numpy_function(end, [epoch], tf.bool),
            lambda: tf.constant(True),
        )
        with tf.control_dependencies([noted]):
            return tf.nest.map_structure(tf.identity, batch, expand_composites=True)

    return pass_on


def check_dataset(data: Any) -> tuple[int, list[Any]]:
    """Return how many elements a dataset has, and what other ranks' must be equal in.

    One that does not know its number is read once, to count.

    Raises:
        ConfigError: It is infinite.
    """
    num_elements = int(data.cardinality())
    if num_elements == tf.data.UNKNOWN_CARDINALITY:
        num_elements = int(data.reduce(np.int64(0), lambda count, *_: count + 1))
    if num_elements == tf.data.INFINITE_CARDINALITY:
        raise ConfigError(
            "kr.data.shard: the tf.data.Dataset is infinite; expected one that ends, of which each "
            "sample is read once an epoch. Call shard before .repeat(), and fit with epochs=."
        )
    return num_elements, [str(data.element_spec)]
