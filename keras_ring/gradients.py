"""Reduce the gradients of one step over all ranks.

The one place that knows what a gradient may be: a tensor, `tf.IndexedSlices`, `None`, or the new
value of a variable that is overwritten with it. It knows no optimizer and no tape, and it groups
nothing: the engine fuses what is ready.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import tensorflow as tf

from keras_ring import collectives, graphs, runtime
from keras_ring.collectives.naming import LABEL_SEPARATOR
from keras_ring.compression import Compression
from keras_ring.gradient_groups import plan_groups

Gradient: TypeAlias = Any  # a tensor, tf.IndexedSlices or None; TensorFlow ships no types

Op: TypeAlias = Literal["mean", "sum"]

# How often a scope was reduced within each function that is being traced.
_uses: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = weakref.WeakKeyDictionary()


def reduce_gradients(
    gradients: Sequence[Gradient],
    variables: Sequence[Any],
    *,
    op: Op = "mean",
    scope: str,
    compression: Compression | None = None,
) -> list[Gradient]:
    """Reduce each gradient over all ranks, without waiting for the others.

    Each large gradient is a request of its own, small ones share requests (gradient_groups.py),
    submitted last layer first: that is the order in which backprop produces them, so that
    communication runs beside it. A request is known to the other ranks by `scope` and the position
    in the list; names of variables are labels in messages only, since Keras numbers layers
    differently on a rank that has built another model before.

    `tf.IndexedSlices` are not added up: the result holds the rows of all ranks, in rank order, so
    that an optimizer sees what it would see for the joint batch. A rank may hold no rows.

    The gradient of a variable with `overwrite_with_gradient` is not a gradient but the variable's
    next value: the scale or the history of absolute maxima of a float8 layer. Those are reduced
    with "max" whatever `op` is. The maximum over ranks is the maximum over the joint batch, the
    scale grows with it, and Keras itself joins the values of accumulated batches so.

    Args:
        gradients: One for each variable. `None` stays `None`, and must be `None` on every rank.
        variables: The variables (`keras.Variable` or `tf.Variable`), in the same order.
        op: `"mean"` or `"sum"`. Defaults to `"mean"`.
        scope: Tells the gradients of one optimizer or tape from those of another. Equal on every
            rank.
        compression: See `allreduce`; of dense gradients alone. Values that overwrite their variable
            must be exact. Defaults to None.

    Returns:
        A list like `gradients`, equal on all ranks.

    Collective: every rank calls it with as many gradients, under the same `scope`.

    Example:
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = reduce_gradients(gradients, model.trainable_variables, scope="mine")
    """
    prefix = request_prefix(scope)
    labels = [getattr(variable, "path", None) or variable.name for variable in variables]
    wanted: list[collectives.Op] = ["max" if is_overwritten(v) else op for v in variables]
    reduced: list[Gradient] = [None] * len(gradients)
    for group in plan_groups(gradients, wanted):
        results = collectives.grouped_allreduce(
            [gradients[i] for i in group],
            wanted[group[0]],
            name=f"{prefix}/{group[0]}#" + LABEL_SEPARATOR.join(labels[i] for i in group),
            compression=None if is_overwritten(variables[group[0]]) else compression,
        )
        for i, result in zip(group, results, strict=True):
            reduced[i] = result
    for i, (gradient, label) in reversed(list(enumerate(zip(gradients, labels, strict=True)))):
        if isinstance(gradient, tf.IndexedSlices):
            reduced[i] = _gather_slices(gradient, wanted[i], f"{prefix}/{i}", label)
    return reduced


def agree(flag: tf.Tensor, *, scope: str) -> tf.Tensor:
    """Return whether `flag` holds on every rank.

    Args:
        flag: Boolean scalar of this rank.
        scope: As in `reduce_gradients`.

    Returns:
        Boolean scalar, equal on all ranks.

    Collective: every rank calls it under the same `scope`.

    Example:
        finite = agree(tf.math.is_finite(loss), scope="mine")
    """
    name = f"{request_prefix(f'{scope}/agree')}#agreement on finite gradients"
    return tf.equal(collectives.allreduce(tf.cast(flag, tf.int32), "min", name=name), 1)


def is_overwritten(variable: Any) -> bool:
    """Return whether Keras assigns this variable's gradient to it, as float8 layers ask."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _gather_slices(
    slices: tf.IndexedSlices, op: collectives.Op, key: str, label: str
) -> tf.IndexedSlices:
    """The rows of all ranks; an optimizer adds up those with equal indices, as within one batch."""
    indices = collectives.allgather(slices.indices, name=f"{key}/indices#{label}")
    values = collectives.allgather(slices.values, name=f"{key}/values#{label}")
    if op == "mean":
        values = values / tf.cast(runtime.size(), values.dtype)
    return tf.IndexedSlices(values, indices, slices.dense_shape)


def request_prefix(scope: str) -> str:
    """The common part of the names; another one for each use of a scope within one function.

    Two uses may be in flight at once there, and would be taken for one another. Counted for the
    function that is being traced and not for the process: a rank that traces once more than others
    still gets the same names.
    """
    if tf.executing_eagerly():
        return f"gradient/{scope}"
    graph = graphs.function_graph(tf.compat.v1.get_default_graph())
    uses = _uses.setdefault(graph, collections.Counter())
    uses[scope] += 1
    return f"gradient/{scope}" if uses[scope] == 1 else f"gradient/{scope}/use {uses[scope]}"
