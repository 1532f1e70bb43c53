"""Making variables equal on all ranks."""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from keras_ring.collectives import grouped_broadcast
from keras_ring.collectives.naming import call_name, label_of
from keras_ring.errors import ConfigError
from keras_ring.process_sets import ProcessSet


def broadcast_variables(
    variables: Iterable[Any],
    root_rank: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> None:
    """Give every rank's variables the root's values.

    Variables of strings and of resources (lookup tables) hold no numbers and are left alone.

    Args:
        variables: `keras.Variable` or `tf.Variable`, in the same order on every rank, e.g.
            `model.variables` or `optimizer.variables`.
        root_rank: The rank whose values are given. Defaults to 0.
        name: What the ranks are matched by. Defaults to the call's place in its function.
        process_set: The ranks that take part. Defaults to all.

    Raises:
        MismatchError: Ranks have other shapes, dtypes or numbers of variables.
        KerasRingError: As `keras_ring.broadcast`.

    Collective: every rank (of the set) calls it.
    Cost: log2(P) hops for each variable; agreed on once.
    Thread: main thread only.

    Example:
        >>> v = tf.Variable([1.0, 2.0])
        >>> kr.broadcast_variables([v], root_rank=0)
    """
    name = call_name(name, "broadcast_variables")
    targets = []
    for variable in variables:
        if not hasattr(variable, "assign"):
            raise ConfigError(
                f"{label_of(name)}: expected variables, but got {type(variable).__name__}. Pass "
                "a list such as model.variables."
            )
        if tf.as_dtype(variable.dtype) not in (tf.string, tf.resource, tf.variant):
            targets.append(variable)
    values = grouped_broadcast(targets, root_rank, name=name, process_set=process_set)
    for variable, value in zip(targets, values, strict=True):
        variable.assign(value)
