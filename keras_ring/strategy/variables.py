"""How variables are made in a scope: equal at the start, and added up or averaged as they ask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import distribute_utils
from tensorflow.python.eager import record
from tensorflow.python.trackable.base import CheckpointInitialValue

from keras_ring import runtime
from keras_ring.collectives import broadcast
from keras_ring.strategy.agreement import agree

_DIFFERENT_MODELS = (
    "Build the same model on every rank, with the same layers in the same order; if it depends on "
    "the data, decide with what all ranks know (keras_ring.broadcast_object)."
)
# Keras's name for the state of its random numbers.
_SEED_STATE = "seed_generator_state"
# Odd, so that each rank's first number differs from that of any other: 2^32 over the golden ratio.
_SEED_STEP = 0x9E3779B1


def create(
    strategy: Any, device: str, next_creator: Callable[..., Any], kwargs: dict[str, Any]
) -> Any:
    """Make a variable that begins with rank 0's value.

    One that is read as the sum over ranks (Keras's metrics), or updated with a sum or mean over
    ranks, becomes a distributed variable of tf.distribute with one component; any other is a plain
    `tf.Variable`, which costs nothing to read.
    """
    kwargs = _with_common_value(kwargs)
    synchronization = kwargs.get("synchronization")
    aggregation = kwargs.get("aggregation")
    is_summed = aggregation in (tf.VariableAggregation.SUM, tf.VariableAggregation.MEAN)
    if synchronization != tf.VariableSynchronization.ON_READ and not is_summed:
        with tf.device(device):
            return next_creator(**kwargs)

    def create_component(**component: Any) -> list[Any]:
        with tf.device(device), record.stop_recording():
            return [next_creator(**component)]

    return distribute_utils.create_mirrored_variable(
        strategy,
        create_component,
        distribute_utils.VARIABLE_CLASS_MAPPING,
        distribute_utils.VARIABLE_POLICY_MAPPING,
        **kwargs,
    )


def _with_common_value(kwargs: dict[str, Any]) -> dict[str, Any]:
    initial_value = kwargs.get("initial_value")
    if initial_value is None or runtime.size() == 1:
        return kwargs
    name = str(kwargs.get("name") or "variable")

    def common_value() -> Any:
        value = initial_value() if callable(initial_value) else initial_value
        if isinstance(value, CheckpointInitialValue):
            value = value.wrapped_value
        value = tf.convert_to_tensor(value, dtype=kwargs.get("dtype"))
        if value.dtype in (tf.string, tf.resource, tf.variant):
            return value
        if tf.executing_eagerly():
            agree(
                "makes a variable",
                (name.rpartition("/")[2], value.shape.as_list(), value.dtype.name),
                advice=_DIFFERENT_MODELS,
            )
        common = broadcast(value, name=f"strategy/variable#{name}")
        common.set_shape(value.shape)
        if name.endswith(_SEED_STATE):
            common = _seed_of_rank(common)
        return common

    return {**kwargs, "initial_value": common_value}


def _seed_of_rank(state: Any) -> Any:
    """Return another state on each rank, so that each drops other units; rank 0 keeps its own."""
    offset = tf.cast((runtime.rank() * _SEED_STEP) % 2**31, state.dtype)
    return tf.concat([state[:1] + offset, state[1:]], 0)


def moving_statistics(model: Any) -> list[Any]:
    """Return the variables in which a model's layers keep averages of what they have seen.

    Each rank updates them with its own rows (BatchNormalization, unless it is synchronized), so
    that they are averaged over the ranks after each step.
    """
    return [
        variable
        for variable in model.non_trainable_variables
        if variable.name.startswith("moving_")
        and tf.as_dtype(variable.dtype).is_floating
        and not getattr(variable, "_trainable", False)
    ]
