"""Batch normalisation over the batches of all ranks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

import keras_ring


@keras.saving.register_keras_serializable("keras_ring")
class SyncBatchNormalization(keras.layers.BatchNormalization):
    """Keras's `BatchNormalization` with mean and variance of all ranks' rows together.

    Ranks may have batches of different sizes. Under `RingStrategy` use Keras's own
    `BatchNormalization(synchronized=True)`.

    Args:
        fused: Must be False, as with Horovod.
        **kwargs: For `keras.layers.BatchNormalization`.

    Raises:
        ValueError: `fused` is true.

    Collective: every rank calls the layer with `training=True` in the same steps.
    Cost: one allreduce of three numbers for each channel for each call.
    """

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        """Check `fused`."""
        if fused in (True, None):
            raise ValueError("SyncBatchNormalization does not take fused=True.")
        kwargs.pop("synchronized", None)
        super().__init__(**kwargs)

    def _moments(self, inputs: Any, mask: Any) -> tuple[Any, Any]:
        values = tf.cast(inputs, tf.float32)
        axes = list(self._reduction_axes)
        weights = tf.ones_like(values)
        if mask is not None:
            weights = tf.broadcast_to(tf.cast(mask, tf.float32)[..., tf.newaxis], tf.shape(values))
        sums = [
            tf.reduce_sum(weights, axes),
            tf.reduce_sum(weights * values, axes),
            tf.reduce_sum(weights * values * values, axes),
        ]
        count, total, squares = keras_ring.grouped_allreduce(sums, "sum")
        mean = tf.math.divide_no_nan(total, count)
        variance = tf.math.divide_no_nan(squares, count) - mean * mean
        return tf.cast(mean, inputs.dtype), tf.cast(tf.maximum(variance, 0.0), inputs.dtype)
