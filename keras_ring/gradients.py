"""Reduce the gradients of one step over all ranks.

The one place that knows what a gradient may be: a tensor, `tf.IndexedSlices`, `None`, or the new
value of a variable that is overwritten with it. It knows no optimizer and no tape, and it groups
nothing: the engine fuses what is ready.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Sequence
from typing import Any, TypeAlias

import tensorflow as tf

from keras_ring import collectives, graphs, xla
from keras_ring.collectives.naming import LABEL_SEPARATOR
from keras_ring.errors import ConfigError
from keras_ring.gradient_groups import plan_groups
from keras_ring.process_sets import ProcessSet, size_of
from keras_ring.reduction import Reduction, identity

Gradient: TypeAlias = Any  # a tensor, tf.IndexedSlices or None; TensorFlow ships no types

# How often a scope was reduced within each function that is being traced.
_uses: weakref.WeakKeyDictionary[Any, collections.Counter[str]] = weakref.WeakKeyDictionary()


def reduce_gradients(
    gradients: Sequence[Gradient],
    variables: Sequence[Any],
    reduction: Reduction,
    *,
    scope: str,
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
    with "max" whatever the operation is, and uncompressed. The maximum over ranks is the maximum
    over the joint batch, the scale grows with it, and Keras itself joins the values of accumulated
    batches so.

    Args:
        gradients: One for each variable. `None` stays `None`, and must be `None` on every rank.
        variables: The variables (`keras.Variable` or `tf.Variable`), or tensors, in the same order.
        reduction: How; see there. Gradients of local variables come back scaled at most.
        scope: Tells the gradients of one optimizer or tape from those of another. Equal on every
            rank.

    Returns:
        A list like `gradients`, equal on all ranks.

    Collective: every rank calls it with as many gradients, under the same `scope`.

    Example:
        gradients = tape.gradient(loss, model.trainable_variables)
        gradients = reduce_gradients(
            gradients, model.trainable_variables, Reduction(), scope="mine"
        )
    """
    if xla.is_compiling():
        gradients = [_of_known_shape(g, v) for g, v in zip(gradients, variables, strict=True)]
    prefix = request_prefix(scope)
    labels = [_label(variable, i) for i, variable in enumerate(variables)]
    wanted: list[collectives.Op] = ["max" if is_overwritten(v) else reduction.op for v in variables]
    reduced = _local_gradients(gradients, variables, reduction)
    shared = [
        None if local is not None else _as_asked(gradient, reduction)
        for gradient, local in zip(gradients, reduced, strict=True)
    ]
    for group in plan_groups(shared, wanted, _groups_of_positions(variables, reduction)):
        name = f"{prefix}/{group[0]}#" + LABEL_SEPARATOR.join(labels[i] for i in group)
        results = _reduce_group([shared[i] for i in group], wanted[group[0]], name, reduction)
        for i, result in zip(group, results, strict=True):
            reduced[i] = result
    for i, (gradient, label) in reversed(list(enumerate(zip(shared, labels, strict=True)))):
        if isinstance(gradient, tf.IndexedSlices):
            reduced[i] = _gather_slices(gradient, wanted[i], f"{prefix}/{i}", label, reduction)
    return reduced


def _reduce_group(
    values: Sequence[tf.Tensor], op: collectives.Op, name: str, reduction: Reduction
) -> Sequence[tf.Tensor]:
    """Reduce dense gradients of one dtype as one request."""
    if op == "max":  # values that overwrite their variables
        return collectives.grouped_allreduce(
            values, op, name=name, process_set=reduction.process_set
        )
    compressor = reduction.compressor
    sent = [(v, None) if compressor is None else compressor.compress(v) for v in values]
    divisor = reduction.predivide_factor
    results = collectives.grouped_allreduce(
        [value for value, _ in sent],
        op,
        name=name,
        prescale_factor=1.0 / divisor,
        postscale_factor=divisor * reduction.factor,
        compression=reduction.compression,
        process_set=reduction.process_set,
    )
    if compressor is None:
        return results
    return [compressor.decompress(r, c) for r, (_, c) in zip(results, sent, strict=True)]


def _label(variable: Any, position: int) -> str:
    """What messages call a variable; eager tensors have no name."""
    path = getattr(variable, "path", None)
    if path is not None:
        return str(path)
    is_nameless = isinstance(variable, tf.Tensor) and tf.executing_eagerly()
    return f"source {position}" if is_nameless else str(variable.name)


def _local_gradients(
    gradients: Sequence[Gradient], variables: Sequence[Any], reduction: Reduction
) -> list[Gradient]:
    """The gradients of local variables, scaled if wanted; None for all others."""
    local = reduction.local_ids()
    size = size_of(reduction.process_set)
    divisor = size if reduction.scales_local and reduction.op == "mean" else 1
    return [
        _divide(gradient, divisor) if identity(variable) in local else None
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def _divide(gradient: Gradient, divisor: int) -> Gradient:
    if gradient is None or divisor == 1:
        return gradient
    if isinstance(gradient, tf.IndexedSlices):
        values = _divide(gradient.values, divisor)
        return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
    return gradient / tf.cast(divisor, gradient.dtype)


def _as_asked(gradient: Gradient, reduction: Reduction) -> Gradient:
    if reduction.sparse_as_dense and isinstance(gradient, tf.IndexedSlices):
        return tf.convert_to_tensor(gradient)
    return gradient


def _groups_of_positions(
    variables: Sequence[Any], reduction: Reduction
) -> int | list[list[int]] | None:
    if reduction.groups is None or isinstance(reduction.groups, int):
        return reduction.groups
    position = {identity(variable): i for i, variable in enumerate(variables)}
    return [
        [position[identity(v)] for v in group if identity(v) in position]
        for group in reduction.groups
    ]


def agree(flag: tf.Tensor, *, scope: str, process_set: ProcessSet | None = None) -> tf.Tensor:
    """Return whether `flag` holds on every rank.

    Args:
        flag: Boolean scalar of this rank.
        scope: As in `reduce_gradients`.
        process_set: The ranks that are asked. Defaults to all.

    Returns:
        Boolean scalar, equal on all ranks.

    Collective: every rank calls it under the same `scope`.

    Example:
        finite = agree(tf.math.is_finite(loss), scope="mine")
    """
    name = f"{request_prefix(f'{scope}/agree')}#agreement on finite gradients"
    vote = tf.cast(flag, tf.int32)
    return tf.equal(collectives.allreduce(vote, "min", name=name, process_set=process_set), 1)


def is_overwritten(variable: Any) -> bool:
    """Return whether Keras assigns this variable's gradient to it, as float8 layers ask."""
    return bool(getattr(variable, "overwrite_with_gradient", False))


def _of_known_shape(gradient: Gradient, variable: Any) -> Gradient:
    """What XLA can reduce: Keras's functions know no batch size once they have seen two.

    Rows of unknown number are added up, which changes nothing but the norm of repeated ones.
    """
    if gradient is None or is_overwritten(variable):
        return gradient
    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    if values.shape.is_fully_defined():
        return gradient
    return tf.ensure_shape(tf.convert_to_tensor(gradient), variable.shape)


def _gather_slices(
    slices: tf.IndexedSlices,
    op: collectives.Op,
    key: str,
    label: str,
    reduction: Reduction,
) -> tf.IndexedSlices:
    """The rows of all ranks; an optimizer adds up those with equal indices, as within one batch."""
    if op == "adasum":
        raise ConfigError(
            f"the gradient of {label!r} is tf.IndexedSlices, which op='adasum' does not take; use "
            "sparse_as_dense=True."
        )
    process_set = reduction.process_set
    indices = collectives.allgather(
        slices.indices, name=f"{key}/indices#{label}", process_set=process_set
    )
    values = collectives.allgather(
        slices.values, name=f"{key}/values#{label}", process_set=process_set
    )
    if op == "mean":
        values = values / tf.cast(size_of(process_set), values.dtype)
    if reduction.factor != 1:
        values = values * tf.cast(reduction.factor, values.dtype)
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
