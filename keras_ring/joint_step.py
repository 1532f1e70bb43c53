"""The part that this rank has in one step of all ranks.

A strategy enters a `Replica` around what it runs; whoever reduces gradients inside asks for it.
Without a strategy there is none, and each rank counts as much as any other.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import tensorflow as tf

from keras_ring.errors import ConfigError
from keras_ring.gradient_groups import SMALL_BYTES

_local = threading.local()


class Replica:
    """What runs on this rank, as one of the replicas of a strategy.

    Args:
        is_sum: Whether gradients are added up, as `tf.distribute` has it: the losses were divided
            by the number of replicas. Otherwise they are averaged, each rank weighing as much as
            the joint batch has rows of its own.
        num_rows: int64 scalar, this rank's rows in the step's joint batch; None where all ranks
            weigh the same.
        num_all_rows: int64 scalar, all ranks' rows.
        size: Number of ranks.
    """

    def __init__(
        self,
        *,
        is_sum: bool,
        num_rows: Any = None,
        num_all_rows: Any = None,
        size: int = 1,
    ) -> None:
        self.is_sum = is_sum
        self.num_rows = num_rows
        self.size = size
        # Whether the loss was multiplied with the weight, so that gradients hold it already.
        self.is_loss_weighed = False
        # While True, what is logged of a loss counts batches and not rows.
        self.counts_batches = False
        self.share: Any = None
        self.weight: Any = None
        if num_rows is not None:
            rows = tf.cast(num_rows, tf.float64)
            all_rows = tf.cast(num_all_rows, tf.float64)
            # This rank's part of the joint batch, float64 scalar: 1 / size when all are equal.
            self.share = tf.math.divide_no_nan(rows, all_rows)
            # What a mean over ranks must be multiplied with: exactly 1 when all are equal.
            self.weight = tf.math.divide_no_nan(rows * size, all_rows)

    def __enter__(self) -> Replica:
        """Make it the current one of this thread."""
        self._outer = current()
        _local.replica = self
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give the place back to the one around it."""
        _local.replica = self._outer

    def weigh_loss(self, loss: Any) -> Any:
        """Return the loss whose gradients can be averaged over the ranks.

        Raises:
            ConfigError: It is no scalar.
        """
        if self.weight is None or self.is_loss_weighed:
            return loss
        shape = getattr(loss, "shape", None)
        if shape is not None and shape.rank:
            raise ConfigError(
                f"RingStrategy: the loss has the shape {tuple(shape)}; expected a scalar, because "
                "a mean and a sum over the rows of all ranks are scaled in different ways. "
                "Compile with a loss of reduction='sum_over_batch_size' or reduction='sum'."
            )
        self.is_loss_weighed = True
        return loss * tf.cast(self.weight, loss.dtype)

    def weigh_gradients(self, gradients: Sequence[Any]) -> list[Any]:
        """Return gradients that can be averaged over the ranks, of a rank without rows zeros.

        A rank that has no rows may have computed NaN, the mean of nothing.
        """
        if self.weight is None:
            return list(gradients)
        factor = self.weight
        if self.is_loss_weighed:
            factor = tf.cast(self.num_rows > 0, tf.float64)
        return [None if g is None else _weigh(g, factor) for g in gradients]


def current() -> Replica | None:
    """Return the replica that this thread runs; None outside of a strategy's `run`."""
    return getattr(_local, "replica", None)


def _weigh(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        values = tf.math.multiply_no_nan(gradient.values, tf.cast(factor, gradient.values.dtype))
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    if not gradient.dtype.is_floating:
        return gradient

    def weighed() -> Any:
        return tf.math.multiply_no_nan(gradient, tf.cast(factor, gradient.dtype))

    num_elements = gradient.shape.num_elements()
    if tf.executing_eagerly():
        return gradient if float(factor) == 1.0 else weighed()
    if num_elements is not None and num_elements * gradient.dtype.size <= SMALL_BYTES:
        return weighed()
    # The factor is nearly always 1: a large gradient is passed on without being touched.
    return tf.cond(tf.equal(factor, 1.0), lambda: gradient, weighed)
