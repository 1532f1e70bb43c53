"""One step of a Keras model on this rank, as part of the step of all ranks.

Within it a model's code is run as in one process on this rank's rows: losses are means over them,
and `num_replicas_in_sync` is 1. What leaves the step is what one process would have had from all
rows: gradients are averaged with each rank's share of the rows (joint_step.py, reducer.py),
moving statistics likewise, and logs are those of all rows.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.tensorflow.trainer import TensorFlowTrainer
from tensorflow.python.distribute import values

from keras_ring import joint_step, runtime
from keras_ring.errors import ConfigError
from keras_ring.joint_step import Replica
from keras_ring.optimizer_hooks import adopt
from keras_ring.reducer import leaves
from keras_ring.strategy.agreement import agree
from keras_ring.strategy.collectives import sum_in_turn
from keras_ring.strategy.variables import moving_statistics

_checked: weakref.WeakSet[Any] = weakref.WeakSet()


def model_of(fn: Any) -> Any:
    """Return the model whose `train_step` or `test_step` `fn` is; None for any other function."""
    owner = getattr(fn, "__self__", None)
    is_step = getattr(fn, "__name__", "") in ("train_step", "test_step")
    return owner if is_step and isinstance(owner, TensorFlowTrainer) else None


def as_joint_step(fn: Callable[..., Any], model: Any) -> Callable[..., Any]:
    """Return a model's `train_step` or `test_step` as part of the step of all ranks."""
    is_training = getattr(fn, "__name__", "") != "test_step"

    @functools.wraps(fn)
    def step(*args: Any, **kwargs: Any) -> Any:
        _prepare(model)
        if runtime.size() == 1:
            with Replica(is_sum=False):
                return fn(*args, **kwargs)
        rows = _num_rows([*args, *kwargs.values()])
        (all_rows,) = sum_in_turn("strategy/rows", [rows])
        replica = Replica(is_sum=False, num_rows=rows, num_all_rows=all_rows, size=runtime.size())
        with replica:
            logs = fn(*args, **kwargs)
            if is_training:
                _average(moving_statistics(model), replica.share)
            return _joint_logs(model, logs, replica.share)

    return step


def _prepare(model: Any) -> None:
    """Make the optimizer reduce gradients; the first time, check that the ranks' models agree."""
    strategy = tf.distribute.get_strategy()
    optimizers = [v for v in vars(model).values() if isinstance(v, keras.optimizers.Optimizer)]
    for optimizer in [*optimizers, getattr(model, "optimizer", None)]:
        if optimizer is not None:
            adopt(optimizer)
            for part in [optimizer, *leaves(optimizer)]:
                # Keras remembers the strategy in whose scope an optimizer was made.
                part._distribution_strategy = strategy
    if model in _checked:
        return
    _checked.add(model)
    plain = [
        v.path
        for v in _metric_variables(model)
        if not isinstance(v.value, values.SyncOnReadVariable)
    ]
    if plain and runtime.size() > 1:
        raise ConfigError(
            f"RingStrategy: the metric variable {plain[0]!r} was made outside of the strategy's "
            "scope, so that it would count this rank's rows only. Make metrics, such as "
            "keras.metrics.AUC(), within the scope, or give compile their names."
        )
    with tf.init_scope():
        agree(
            "begins to use a model",
            [
                (tuple(v.shape), str(v.dtype), bool(v.trainable))
                for v in model.trainable_variables + model.non_trainable_variables
            ],
            advice="Build the same model on every rank.",
        )


def _num_rows(data: Sequence[Any]) -> Any:
    """Return how many rows a batch has, as Keras counts them: int64 scalar."""
    inputs = data[0] if data else None
    if isinstance(inputs, (tuple, list)):
        inputs = keras.utils.unpack_x_y_sample_weight(tuple(inputs))[0]
    for part in [*tf.nest.flatten(inputs), *tf.nest.flatten(data)]:
        if isinstance(part, tf.RaggedTensor):
            return tf.cast(part.nrows(), tf.int64)
        if isinstance(part, tf.SparseTensor):
            return tf.cast(part.dense_shape[0], tf.int64)
        if hasattr(part, "shape") and len(part.shape) > 0:
            return tf.shape(part, tf.int64)[0]
    return tf.constant(1, tf.int64)


def _average(variables: Sequence[Any], share: Any) -> None:
    """Give variables the mean over ranks, each weighing as much as it has of the joint batch."""
    # A rank without rows may have the mean of nothing, which is not a number.
    parts = [tf.math.multiply_no_nan(v.value, tf.cast(share, v.value.dtype)) for v in variables]
    for variable, value in zip(variables, sum_in_turn("strategy/moving", parts), strict=True):
        variable.assign(value)


def _joint_logs(model: Any, logs: Any, share: Any) -> Any:
    """Return a step's logs for the rows of all ranks: metrics from the sums of their states.

    What is no metric, such as a number that a custom `train_step` returns, is the mean over the
    rows.
    """
    if not isinstance(logs, dict):
        return logs
    variables = _metric_variables(model)
    own = [tf.identity(v.value) for v in variables]
    others = {
        name: tf.convert_to_tensor(value) for name, value in logs.items() if _is_number(value)
    }
    parts = [
        tf.math.multiply_no_nan(tf.cast(value, tf.float32), tf.cast(share, tf.float32))
        for value in others.values()
    ]
    sums = sum_in_turn("strategy/logs", [*own, *parts])
    means = dict(zip(others, sums[len(own) :], strict=True))
    joint = {
        name: tf.cast(means[name], others[name].dtype) if name in means else value
        for name, value in logs.items()
    }
    state = [(v, value) for v, value in zip(variables, sums[: len(own)], strict=True)]
    with keras.StatelessScope(state_mapping=state):
        results = model.get_metrics_result()
    joint.update({name: value for name, value in results.items() if name in joint})
    return joint


def _metric_variables(model: Any) -> list[Any]:
    """Return the variables that metrics add up."""
    found = {
        id(v): v for metric in model.metrics for v in metric.variables if v.aggregation == "sum"
    }
    return list(found.values())


def _is_number(value: Any) -> bool:
    if isinstance(value, (int, float)):
        return not isinstance(value, bool)
    is_tensor = isinstance(value, (tf.Tensor, tf.Variable))
    return is_tensor and value.shape.rank == 0 and (value.dtype.is_floating)


def scale_loss_of_all(
    loss: Any,
    reduction: str | None,
    weight_sum: Callable[[], Any],
    *,
    is_weighted_mean: bool,
) -> Any:
    """Return a loss whose mean over the rows of all ranks is the loss of the joint batch.

    Args:
        loss: Reduced over this rank's rows.
        reduction: Keras's name for how.
        weight_sum: Returns what the loss was divided by.
        is_weighted_mean: Whether that is other than the number of rows: a mask's, or weights'.
    """
    replica = joint_step.current()
    if replica is None or replica.share is None:
        return loss
    if reduction == "sum":
        return tf.math.divide_no_nan(loss, tf.cast(replica.share, loss.dtype))
    if not is_weighted_mean:
        return loss
    own = tf.cast(weight_sum(), tf.float64)
    (joint,) = sum_in_turn("strategy/loss weights", [own])
    factor = tf.math.divide_no_nan(own, joint * replica.share)
    return loss * tf.cast(factor, loss.dtype)
