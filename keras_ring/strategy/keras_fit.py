"""Hooks for what Keras does around its steps: data, losses, `compile`, and what steps return.

They do nothing but within a RingStrategy of several ranks. Each is checked by a test that fails
when Keras no longer calls what is hooked.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.backend.tensorflow import trainer
from keras.src.losses import loss as keras_loss
from keras.src.trainers import compile_utils

from keras_ring import collectives, joint_step, runtime
from keras_ring.errors import ConfigError
from keras_ring.fitting.hooks import hooked, is_hooked
from keras_ring.strategy.agreement import agree, gather
from keras_ring.strategy.fit_step import scale_loss_of_all


def patch() -> None:
    """Hook Keras, once."""
    if is_hooked(trainer.reduce_per_replica, _reduce_per_replica):
        return
    trainer.reduce_per_replica = hooked(trainer.reduce_per_replica, _reduce_per_replica)
    iterator = trainer.TFEpochIterator
    iterator.__init__ = hooked(iterator.__init__, _start_epochs)
    iterator.reset = hooked(iterator.reset, _reset_epochs)
    cls = trainer.TensorFlowTrainer
    cls._maybe_symbolic_build = hooked(cls._maybe_symbolic_build, _maybe_symbolic_build)
    cls.predict_on_batch = hooked(cls.predict_on_batch, _predict_on_batch)
    compiling = next(c for c in keras.Model.__mro__ if "compile" in vars(c))
    compiling.compile = hooked(compiling.compile, _compile)
    keras_loss.reduce_weighted_values = hooked(
        keras_loss.reduce_weighted_values, _reduce_weighted_values
    )
    losses = compile_utils.CompileLoss
    losses.call = hooked(losses.call, _compute_losses)
    keras_loss.unscale_loss_for_distribution = hooked(
        keras_loss.unscale_loss_for_distribution, _logged_loss
    )


def is_ours(strategy: Any) -> bool:
    """Return whether a strategy is a RingStrategy of several ranks."""
    return bool(getattr(strategy, "is_keras_ring", False)) and runtime.size() > 1


def _reduce_per_replica(
    plain: Callable[..., Any], values: Any, strategy: Any, reduction: str
) -> Any:
    """Put the ranks' predictions together; logs were joined in the step."""
    if not is_ours(strategy):
        return plain(values, strategy, reduction)
    if reduction != "concat":
        return values
    return tf.nest.map_structure(_concatenate, values)


def _concatenate(part: Any) -> Any:
    if isinstance(part, tf.Tensor) and part.shape.rank == 0:
        return part
    if isinstance(part, tf.Tensor) and part.dtype != tf.string:
        return collectives.allgather(part)
    raise ConfigError(
        f"RingStrategy: predict cannot put together the ranks' {type(part).__name__} of "
        f"{part.dtype.name}; expected tensors of numbers. Return such from the model, or predict "
        "outside of the scope."
    )


def _start_epochs(
    plain: Callable[..., Any], self: Any, distribute_strategy: Any = None, *args: Any, **kwargs: Any
) -> None:
    """Let the ranks shuffle alike, and check that they go the same number of steps."""
    if not is_ours(distribute_strategy):
        plain(self, distribute_strategy, *args, **kwargs)
        return
    states = gather(
        "begins fit, evaluate or predict",
        (random.getstate(), np.random.get_state()) if runtime.rank() == 0 else None,
    )
    if runtime.rank() != 0:
        # Keras shuffles a PyDataset by Python's random numbers, and users their generators.
        random.setstate(states[0][0])
        np.random.set_state(states[0][1])
    plain(self, distribute_strategy, *args, **kwargs)
    self.keras_ring_num_steps = getattr(self._distributed_dataset, "keras_ring_num_steps", None)
    _reset_epochs(lambda _: None, self)
    agree(
        "begins fit, evaluate or predict",
        {
            "batches": self._num_batches,
            "steps_per_epoch": self.steps_per_epoch,
            "steps_per_execution": self.steps_per_execution,
        },
        advice="Give every rank the same arguments and data of the same length.",
    )


def _maybe_symbolic_build(
    plain: Callable[..., Any], self: Any, iterator: Any = None, data_batch: Any = None
) -> None:
    """Build a model from what the dataset says of its batches.

    Keras takes a batch in each fit, evaluate and predict, and builds from that, if need be: a
    generator's first batch would never be trained on, and a shuffle be drawn in vain.
    """
    if iterator is not None and getattr(self._distribute_strategy, "is_keras_ring", False):
        spec = iterator._distributed_dataset.element_spec
        parts = [part for part in tf.nest.flatten(spec) if hasattr(part, "shape")]
        # From the number of columns Keras chooses what "accuracy" means.
        is_known = all(p.shape.rank is not None and None not in p.shape[1:] for p in parts)
        first_batches = getattr(iterator.data_adapter, "_first_batches", None)
        if first_batches:
            # Of a Python generator, which cannot begin anew: Keras keeps what it has seen of it.
            # A batch taken here would take along as many as were read ahead, others on each rank.
            data_batch, iterator = first_batches[0], None
        elif is_known or _is_built(self):
            data_batch = tf.nest.map_structure(lambda p: p if hasattr(p, "shape") else None, spec)
            iterator = None
    plain(self, iterator=iterator, data_batch=data_batch)


def _is_built(model: Any) -> bool:
    parts = [model._compile_metrics, model._compile_loss, *model._flatten_layers()]
    return all(part is None or part.built for part in parts)


def _reset_epochs(plain: Callable[..., Any], self: Any) -> None:
    plain(self)
    num_steps = getattr(self, "keras_ring_num_steps", None)
    if num_steps is not None and self._num_batches is not None:
        self._num_batches = num_steps


def _predict_on_batch(plain: Callable[..., Any], self: Any, x: Any) -> Any:
    """Return this rank's rows of what all ranks predict."""
    if not is_ours(self.distribute_strategy):
        return plain(self, x)
    outputs = plain(self, x)
    own = len(next(part for part in tf.nest.flatten(x) if part is not None))
    counts = gather("predicts on a batch", own)
    begin = sum(counts[: runtime.rank()])
    return tf.nest.map_structure(lambda part: part[begin : begin + own], outputs)


def _compile(plain: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compile in the scope in which the model was built."""
    here = tf.distribute.get_strategy()
    own = getattr(self, "_distribute_strategy", None)
    if is_ours(here) and own is not here:
        raise ConfigError(
            f"RingStrategy: the model {self.name!r} was built outside of the scope and is compiled "
            "inside, so that each rank would train by itself. Build it within `with "
            "strategy.scope():` too."
        )
    if own is None or not is_ours(own):
        return plain(self, *args, **kwargs)
    with own.scope():
        return plain(self, *args, **kwargs)


def _reduce_weighted_values(
    plain: Callable[..., Any],
    values: Any,
    sample_weight: Any = None,
    mask: Any = None,
    reduction: str | None = "sum_over_batch_size",
    dtype: Any = None,
) -> Any:
    """Let a loss with a mask, or that is a sum, be that of the joint batch."""
    loss = plain(values, sample_weight=sample_weight, mask=mask, reduction=reduction, dtype=dtype)
    if is_ours(tf.distribute.get_strategy()) and loss.shape == (0,) and reduction is not None:
        # Of no rows Keras returns no losses, where the others have one number.
        loss = loss if reduction == "none" else tf.reduce_sum(loss)
    is_weighted = reduction == "mean_with_sample_weight"

    def weight_sum() -> Any:
        if not is_weighted:
            return tf.reduce_sum(tf.cast(mask, loss.dtype))
        weights = keras_loss.apply_mask(sample_weight, mask, dtype=loss.dtype, reduction=reduction)
        return tf.reduce_sum(tf.cast(weights, loss.dtype))

    has_own_divisor = mask is not None or (is_weighted and sample_weight is not None)
    return scale_loss_of_all(loss, reduction, weight_sum, is_weighted_mean=has_own_divisor)


def _compute_losses(
    plain: Callable[..., Any], self: Any, y_true: Any, y_pred: Any, sample_weight: Any = None
) -> Any:
    """Let the logged losses of the outputs weigh as they do in one process.

    Keras counts a batch once in them where it does not know the number of rows beforehand.
    """
    replica = joint_step.current()
    if replica is None or tf.nest.flatten(y_pred)[0].shape[0] is not None:
        return plain(self, y_true, y_pred, sample_weight)
    replica.counts_batches = True
    try:
        return plain(self, y_true, y_pred, sample_weight)
    finally:
        replica.counts_batches = False


def _logged_loss(plain: Callable[..., Any], value: Any) -> Any:
    replica = joint_step.current()
    value = plain(value)
    if replica is None or replica.weight is None or not replica.counts_batches:
        return value
    return value * tf.cast(replica.weight, value.dtype)
