"""What tf.distribute asks to be reduced or gathered, as collectives of keras_ring."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from keras_ring import collectives, runtime
from keras_ring.collectives.naming import call_name
from keras_ring.errors import ConfigError
from keras_ring.gradients import request_prefix

# A variable for each place where one step's request could be sent before the last step's has ended.
_turns: dict[str, Any] = {}


def is_mean(op: Any) -> bool:
    """Return whether a `tf.distribute.ReduceOp` or its name asks for the mean; else for the sum."""
    name = str(getattr(op, "name", op)).upper()
    if name not in ("SUM", "MEAN"):
        raise ConfigError(f"RingStrategy: reduce_op is {op!r}; expected 'SUM' or 'MEAN'.")
    return name == "MEAN"


def local_value(value: Any) -> Any:
    """Return this rank's part of what tf.distribute may have wrapped."""
    parts = getattr(value, "_values", None)
    is_wrapped = isinstance(value, tf.distribute.DistributedValues)
    return parts[0] if is_wrapped and parts else value


def reduce_all(op: Any, values: Sequence[Any]) -> list[Any]:
    """Reduce tensors and `tf.IndexedSlices` over all ranks, those of one dtype as one request."""
    results: list[Any] = list(values)
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, value in enumerate(values):
        if isinstance(value, tf.IndexedSlices):
            results[i] = _gather_slices(op, value)
            continue
        results[i] = tf.convert_to_tensor(value)
        groups[results[i].dtype].append(i)
    for dtype, group in groups.items():
        tensors = [results[i] for i in group]
        is_bool = dtype == tf.bool
        if is_bool:
            tensors = [tf.cast(tensor, tf.int32) for tensor in tensors]
        reduced = collectives.grouped_allreduce(
            tensors,
            "mean" if is_mean(op) else "sum",
            name=call_name(None, "strategy_reduce"),
        )
        for i, value in zip(group, reduced, strict=True):
            results[i] = tf.cast(value, tf.bool) if is_bool else value
    return results


def _gather_slices(op: Any, slices: tf.IndexedSlices) -> tf.IndexedSlices:
    values = collectives.allgather(slices.values)
    indices = collectives.allgather(slices.indices)
    if is_mean(op):
        values = values / tf.cast(runtime.size(), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def gather_all(value: Any, axis: int) -> Any:
    """Concatenate the ranks' tensors along `axis`, in rank order."""
    if isinstance(value, tf.IndexedSlices):
        raise NotImplementedError(
            "RingStrategy: gather does not support tf.IndexedSlices; convert them to a tensor, or "
            "gather their values and indices."
        )
    tensor = tf.convert_to_tensor(value)
    rank = tensor.shape.rank
    if rank == 0:
        raise ConfigError(
            "RingStrategy: gather and all_gather take tensors with at least one dimension, but got "
            "a scalar; reshape it to (1,)."
        )
    if rank is not None and not -rank <= axis < rank:
        raise ConfigError(
            f"RingStrategy: axis {axis} is out of range for a tensor of shape {tensor.shape}."
        )
    axis = axis % rank if rank is not None else axis
    if axis == 0:
        return collectives.allgather(tensor)
    order = [axis, *(i for i in range(rank) if i != axis)]
    back = [order.index(i) for i in range(rank)]
    return tf.transpose(collectives.allgather(tf.transpose(tensor, order)), back)


def sum_in_turn(kind: str, values: Sequence[Any]) -> list[Any]:
    """Add up tensors over all ranks once a step, each step after the one before.

    In a loop within a graph TensorFlow begins what does not depend on the step before while that
    is still under way, and two requests would have one name.

    Args:
        kind: What the ranks are matched by.
        values: Tensors, grouped by dtype into requests.
    """
    if not values:
        return []
    key = f"{kind}/turn"
    is_eager = tf.executing_eagerly()
    if not is_eager and key not in _turns:
        with tf.init_scope():
            _turns[key] = _plain_variable(key)
    groups: dict[Any, list[int]] = defaultdict(list)
    for i, value in enumerate(values):
        groups[value.dtype].append(i)
    before = [] if is_eager else [_turns[key].read_value()]
    results: list[Any] = list(values)
    with tf.control_dependencies(before):
        for dtype, group in groups.items():
            summed = collectives.grouped_allreduce(
                [tf.identity(values[i]) for i in group],
                "sum",
                name=f"{request_prefix(f'{kind}/{dtype.name}')}#{kind}",
            )
            for i, value in zip(group, summed, strict=True):
                results[i] = value
    if not is_eager:
        with tf.control_dependencies(results):
            _turns[key].assign_add(1)
    return results


def _plain_variable(name: str) -> Any:
    """Return a variable that belongs to no strategy and to no scope."""
    from tensorflow.python.ops import resource_variable_ops

    return resource_variable_ops.ResourceVariable(0, dtype=tf.int64, trainable=False, name=name)
