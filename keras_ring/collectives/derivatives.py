"""The derivatives of the collectives.

The derivative is that of the sum of all ranks' losses with respect to this rank's input, so that it
agrees with what one process would compute that held all inputs.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from keras_ring import runtime, xla
from keras_ring.collectives.calls import Tensor, derivative_of
from keras_ring.collectives.movements import allgather, alltoall, grouped_allgather
from keras_ring.collectives.reductions import allreduce, grouped_allreduce
from keras_ring.process_sets import of_op, rank_in, size_of


def _attr(op: Any, name: str) -> str:
    return str(op.get_attr(name).decode())


def _gradient_name(op: Any, what: str = "gradient") -> str:
    key, _, label = _attr(op, "tensor_name").partition("#")
    return f"{key}/{what}#{what} of {label or key}"


def _compression(op: Any) -> Any:
    codec = _attr(op, "compression")
    return None if codec == "none" else codec


def _factors(op: Any) -> dict[str, float]:
    return {name: float(_attr(op, name)) for name in ("prescale_factor", "postscale_factor")}


@derivative_of("allreduce")
def _allreduce_gradient(op: Any, *upstream: Tensor) -> list[Tensor]:
    kind = _attr(op, "op")
    if kind in ("mean", "sum"):
        return grouped_allreduce(
            upstream,
            "mean" if kind == "mean" else "sum",
            name=_gradient_name(op),
            process_set=of_op(op),
            compression=_compression(op),
            **_factors(op),
        )
    total = grouped_allreduce(upstream, "sum", name=_gradient_name(op), process_set=of_op(op))
    if kind == "adasum":
        return _adasum_gradient(op, total)
    return _selection_gradient(op, kind, total, op.outputs)


@derivative_of("reducescatter")
def _reducescatter_gradient(op: Any, *upstream: Tensor) -> list[Tensor]:
    kind = _attr(op, "op")
    total = _gather_parts(op, upstream, _gradient_name(op))
    if kind in ("mean", "sum"):
        factor = float(np.prod([*_factors(op).values()]))
        if kind == "mean":
            factor /= size_of(of_op(op))
        return [t * tf.cast(factor, t.dtype) for t in total]
    outputs = _gather_parts(op, op.outputs, _gradient_name(op, "results"))
    return _selection_gradient(op, kind, total, outputs)


def _gather_parts(op: Any, parts: Sequence[Tensor], name: str) -> list[Tensor]:
    """Put together what a reducescatter has cut."""
    size, own = size_of(of_op(op)), rank_in(of_op(op))
    if not xla.is_compiling() or all(x.shape[0] % size == 0 for x in op.inputs):
        return grouped_allgather(parts, name=name, process_set=of_op(op))
    # XLA gathers equal parts only. These do not overlap, so their sum is all of them.
    padded = []
    for x, part in zip(op.inputs, parts, strict=True):
        each, left = divmod(x.shape[0], size)
        before = own * each + min(own, left)
        after = x.shape[0] - before - part.shape[0]
        padded.append(tf.pad(part, [[before, after], *[[0, 0]] * (x.shape.rank - 1)]))
    return grouped_allreduce(padded, "sum", name=name, process_set=of_op(op))


def _selection_gradient(
    op: Any, kind: str, total: Sequence[Tensor], outputs: Sequence[Tensor]
) -> list[Tensor]:
    """Of min, max and product, given the sum of the upstream gradients of the whole result."""
    if kind == "product":
        rows = _inputs_of_all_ranks(op)
        own = rank_in(of_op(op))
        others = [tf.concat([row[:own], row[own + 1 :]], axis=0) for row in rows]
        return [
            t * tf.math.conj(tf.reduce_prod(o, axis=0)) for t, o in zip(total, others, strict=True)
        ]
    # The ranks that hold the extreme value share its gradient.
    holds = [
        tf.cast(_is_result(op, x, y), x.dtype) for x, y in zip(op.inputs, outputs, strict=True)
    ]
    count = grouped_allreduce(holds, "sum", name=_gradient_name(op, "ties"), process_set=of_op(op))
    return [t * h / tf.maximum(c, 1) for t, h, c in zip(total, holds, count, strict=True)]


def _is_result(op: Any, x: Tensor, y: Tensor) -> Tensor:
    """Where the input is the extreme value, which may have been rounded on its way."""
    narrow = {"fp16": tf.float16, "bf16": tf.bfloat16}.get(
        _attr(op, "compression") if op.type == "KerasRingAllreduce" else "none"
    )
    if narrow is None or x.dtype not in (tf.float32, tf.float64):
        return tf.equal(x, y)
    return tf.logical_or(tf.equal(x, y), tf.equal(tf.cast(tf.cast(x, narrow), x.dtype), y))


def _inputs_of_all_ranks(op: Any) -> list[Tensor]:
    return grouped_allgather(
        [tf.expand_dims(x, 0) for x in op.inputs],
        name=_gradient_name(op, "inputs"),
        process_set=of_op(op),
    )


def _adasum_gradient(op: Any, total: Sequence[Tensor]) -> list[Tensor]:
    """Every rank differentiates the whole tree, of which it needs its own branch."""
    before, after = _factors(op).values()
    gradients = []
    for rows, upstream in zip(_inputs_of_all_ranks(op), total, strict=True):
        wide = tf.complex128 if upstream.dtype.is_complex else tf.float64
        inputs = [tf.cast(row, wide) for row in tf.unstack(rows, num=size_of(of_op(op)))]
        with tf.GradientTape() as tape:
            tape.watch(inputs)
            result = after * _adasum([before * x for x in inputs])
        gradient = tape.gradient(
            result, inputs[rank_in(of_op(op))], output_gradients=tf.cast(upstream, wide)
        )
        gradients.append(tf.cast(gradient, upstream.dtype))
    return gradients


def _adasum(tensors: Sequence[Tensor]) -> Tensor:
    """What tf_ops/collectives/adasum.h says, of the tensors of all ranks."""

    def squared(a: Tensor) -> Tensor:
        return tf.reduce_sum(tf.math.real(a * tf.math.conj(a)))

    def weight(dot: Tensor, square: Tensor) -> Tensor:
        is_zero = square == 0
        one = tf.ones_like(dot)
        return tf.where(is_zero, one, one - dot / tf.where(is_zero, one, square) / 2)

    def pair(a: Tensor, b: Tensor) -> Tensor:
        dot = tf.reduce_sum(tf.math.real(a * tf.math.conj(b)))
        return (
            tf.cast(weight(dot, squared(a)), a.dtype) * a
            + tf.cast(weight(dot, squared(b)), b.dtype) * b
        )

    trees = 2 ** (len(tensors).bit_length() - 1)
    pairs = len(tensors) - trees
    level = [pair(*tensors[2 * i : 2 * i + 2]) for i in range(pairs)] + list(tensors[2 * pairs :])
    while len(level) > 1:
        level = [pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


@derivative_of("allgather")
def _allgather_gradient(op: Any, *upstream: Tensor) -> list[Tensor]:
    total = grouped_allreduce(upstream, "sum", name=_gradient_name(op), process_set=of_op(op))
    if xla.is_compiling():  # the parts are equal
        own = rank_in(of_op(op))
        return [
            t[own * x.shape[0] : (own + 1) * x.shape[0]]
            for t, x in zip(total, op.inputs, strict=True)
        ]
    own_rows = tf.stack([tf.shape(x, out_type=tf.int64)[0] for x in op.inputs])
    all_rows = allgather(
        tf.expand_dims(own_rows, 0), name=_gradient_name(op, "rows"), process_set=of_op(op)
    )
    first = tf.reduce_sum(all_rows[: rank_in(of_op(op))], axis=0)
    return [t[first[i] : first[i] + own_rows[i]] for i, t in enumerate(total)]


@derivative_of("alltoall")
def _alltoall_gradient(op: Any, upstream: Tensor, _: Tensor) -> list[Tensor | None]:
    """What came from a rank goes back to it."""
    gradient, _ = alltoall(upstream, op.outputs[1], name=_gradient_name(op), process_set=of_op(op))
    return [gradient, None]


@derivative_of("broadcast")
def _broadcast_gradient(op: Any, *upstream: Tensor) -> list[Tensor | None]:
    is_root = runtime.rank() == int(_attr(op, "root_rank"))
    gradients: list[Tensor | None] = []
    for i, gradient in enumerate(upstream):
        if gradient is None or not (gradient.dtype.is_floating or gradient.dtype.is_complex):
            gradients.append(None)
            continue
        total = allreduce(
            gradient, "sum", name=_gradient_name(op, f"gradient {i}"), process_set=of_op(op)
        )
        gradients.append(total if is_root else tf.zeros_like(total))
    return gradients


tf.no_gradient("KerasRingBarrier")
tf.no_gradient("KerasRingJoin")
