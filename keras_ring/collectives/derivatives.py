"""The derivatives of the collectives.

The derivative is that of the sum of all ranks' losses with respect to this rank's input, so that it
agrees with what one process would compute that held all inputs.
"""

from typing import Any

import tensorflow as tf

from keras_ring import runtime
from keras_ring.collectives.calls import Tensor
from keras_ring.collectives.movements import allgather, grouped_allgather
from keras_ring.collectives.reductions import allreduce, grouped_allreduce


def _attr(op: Any, name: str) -> str:
    return str(op.get_attr(name).decode())


def _gradient_name(op: Any, what: str = "gradient") -> str:
    key, _, label = _attr(op, "tensor_name").partition("#")
    return f"{key}/{what}#{what} of {label or key}"


@tf.RegisterGradient("KerasRingAllreduce")  # type: ignore[untyped-decorator]
def _allreduce_gradient(op: Any, *upstream: Tensor) -> list[Tensor]:
    kind = _attr(op, "op")
    if kind in ("mean", "sum"):
        return grouped_allreduce(
            upstream,
            "mean" if kind == "mean" else "sum",
            name=_gradient_name(op),
            prescale_factor=float(_attr(op, "prescale_factor")),
            postscale_factor=float(_attr(op, "postscale_factor")),
        )
    total = grouped_allreduce(upstream, "sum", name=_gradient_name(op))
    if kind == "product":
        rows = grouped_allgather(
            [tf.expand_dims(x, 0) for x in op.inputs], name=_gradient_name(op, "factors")
        )
        own = runtime.rank()
        others = [tf.concat([row[:own], row[own + 1 :]], axis=0) for row in rows]
        return [
            t * tf.math.conj(tf.reduce_prod(o, axis=0)) for t, o in zip(total, others, strict=True)
        ]
    # The ranks that hold the extreme value share its gradient.
    holds = [tf.cast(x == y, x.dtype) for x, y in zip(op.inputs, op.outputs, strict=True)]
    count = grouped_allreduce(holds, "sum", name=_gradient_name(op, "ties"))
    return [t * h / c for t, h, c in zip(total, holds, count, strict=True)]


@tf.RegisterGradient("KerasRingAllgather")  # type: ignore[untyped-decorator]
def _allgather_gradient(op: Any, *upstream: Tensor) -> list[Tensor]:
    total = grouped_allreduce(upstream, "sum", name=_gradient_name(op))
    own_rows = tf.stack([tf.shape(x, out_type=tf.int64)[0] for x in op.inputs])
    all_rows = allgather(tf.expand_dims(own_rows, 0), name=_gradient_name(op, "rows"))
    first = tf.reduce_sum(all_rows[: runtime.rank()], axis=0)
    return [t[first[i] : first[i] + own_rows[i]] for i, t in enumerate(total)]


@tf.RegisterGradient("KerasRingBroadcast")  # type: ignore[untyped-decorator]
def _broadcast_gradient(op: Any, *upstream: Tensor) -> list[Tensor | None]:
    is_root = runtime.rank() == int(_attr(op, "root_rank"))
    gradients: list[Tensor | None] = []
    for i, gradient in enumerate(upstream):
        if gradient is None or not (gradient.dtype.is_floating or gradient.dtype.is_complex):
            gradients.append(None)
            continue
        total = allreduce(gradient, "sum", name=_gradient_name(op, f"gradient {i}"))
        gradients.append(total if is_root else tf.zeros_like(total))
    return gradients


tf.no_gradient("KerasRingBarrier")
