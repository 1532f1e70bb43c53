"""The collectives on tensors: in eager code and in `tf.function`, with gradients.

Ranks are matched by name, so they may call in any order. All but the tensor and its operation is
given by keyword.
"""

from collections import Counter
from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal, TypeAlias, get_args
from weakref import WeakKeyDictionary

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps

from keras_ring import native, runtime
from keras_ring.errors import ConfigError, from_tf

Tensor: TypeAlias = Any
Op: TypeAlias = Literal["mean", "sum", "min", "max", "product"]

_OP_TYPES = frozenset(
    ("KerasRingAllreduce", "KerasRingAllgather", "KerasRingBroadcast", "KerasRingBarrier")
)
# Stateful ops are chained one after the other by `tf.function`, each waiting for the one before,
# which would keep communication from running beside the backward pass. Ours must run, but in any
# order: they are matched by name. The set is private; tests/parallel/test_graphs.py notices when
# it is gone.
auto_control_deps.MUST_RUN_ORDER_INSENSITIVE_STATEFUL_OPS |= _OP_TYPES

_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_FLOATS = ("float16", "bfloat16", "float32", "float64")
_DTYPES = frozenset(("bool", *_INTEGERS, *_FLOATS, "complex64", "complex128"))


def allreduce(
    tensor: Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor over all ranks; every rank gets the result.

    16-bit floats are summed in float32. The mean of integers is rounded down, like NumPy's
    `sum // size`.

    Args:
        tensor: `(…)`, any numeric dtype; bool with "min" and "max". Same shape and dtype on every
            rank.
        op: One of "mean", "sum", "min", "max", "product". Defaults to "mean".
        name: What the ranks are matched by, up to the first "#"; what follows is shown in
            messages. Must be the same on all ranks. Defaults to the call's place in its
            function.
        prescale_factor: Multiplies every rank's tensor first; with "mean" and "sum". Defaults to 1.
        postscale_factor: Multiplies the result; with "mean" and "sum". Defaults to 1.

    Returns:
        Same shape and dtype as `tensor`, the same bits on every rank.

    Raises:
        ConfigError: The operation has no meaning for the dtype, or `init` was not called.
        MismatchError: Ranks disagree on shape, dtype or op.
        PeerLostError: A rank has died or left.
        StallError: A rank has not called it for `KERAS_RING_STALL_ERROR_S` seconds.

    Collective: every rank calls it, in any order, under the same `name`.
    Cost: 2(P-1) steps, 2(P-1)/P · S bytes sent per rank.
    Thread: any.
    Source: Patarasuk & Yuan, JPDC 2009.

    Example:
        >>> kr.allreduce([1.0, 2.0], "sum").numpy()
        array([1., 2.], dtype=float32)
    """
    return grouped_allreduce(
        [tensor],
        op,
        name=_name(name, "allreduce"),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
    )[0]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reduce several tensors over all ranks as one request: all of them or none.

    Args:
        tensors: Tensors of one dtype.
        op: See `allreduce`.
        name: See `allreduce`.
        prescale_factor: See `allreduce`.
        postscale_factor: See `allreduce`.

    Returns:
        A list of the results, in the order of `tensors`.

    Raises:
        KerasRingError: As `allreduce`.

    Collective: every rank calls it, in any order, under the same `name`.
    Cost: That of one `allreduce` of all bytes.
    Thread: any.

    Example:
        >>> [t.numpy() for t in kr.grouped_allreduce([[1], [2, 3]], "max")]
        [array([1], dtype=int32), array([2, 3], dtype=int32)]
    """
    name = _name(name, "grouped_allreduce")
    if op not in get_args(Op):
        raise ConfigError(
            f"allreduce {_label(name)!r}: op={op!r} is unknown; expected one of {get_args(Op)}."
        )
    if op not in ("mean", "sum") and (prescale_factor != 1.0 or postscale_factor != 1.0):
        raise ConfigError(
            f"allreduce {_label(name)!r}: prescale_factor={prescale_factor} and "
            f"postscale_factor={postscale_factor} go with op='mean' or 'sum', not {op!r}."
        )
    values = _tensors(tensors, "allreduce", name)
    if not values:
        return []
    if any(value.dtype != values[0].dtype for value in values):
        raise ConfigError(
            f"allreduce {_label(name)!r}: the tensors of a group share one dtype, but these are "
            f"{[value.dtype.name for value in values]}; make one group for each."
        )
    return list(
        _run(
            native.ops().keras_ring_allreduce,
            x=values,
            tensor_name=name,
            op=op,
            prescale_factor=repr(float(prescale_factor)),
            postscale_factor=repr(float(postscale_factor)),
        )
    )


def allgather(tensor: Tensor, *, name: str | None = None) -> Tensor:
    """Concatenate the ranks' tensors along the first axis; every rank gets the result.

    Args:
        tensor: `(rows, …)`, any numeric dtype or bool. `rows` may differ between ranks and may be
            zero; the other dimensions and the dtype may not.
        name: See `allreduce`.

    Returns:
        `(total_rows, …)`, the rows of rank 0 first.

    Raises:
        KerasRingError: As `allreduce`.

    Collective: every rank calls it, in any order, under the same `name`.
    Cost: 2(P-1) steps; the other ranks' bytes are received once.
    Thread: any.

    Example:
        >>> kr.allgather([[1, 2]]).numpy()
        array([[1, 2]], dtype=int32)
    """
    return grouped_allgather([tensor], name=_name(name, "allgather"))[0]


def grouped_allgather(tensors: Sequence[Tensor], *, name: str | None = None) -> list[Tensor]:
    """Gather several tensors as one request: all of them or none.

    Args:
        tensors: Tensors of one dtype, each as for `allgather`.
        name: See `allreduce`.

    Returns:
        A list of the results, in the order of `tensors`.

    Raises:
        KerasRingError: As `allreduce`.

    Collective: every rank calls it, in any order, under the same `name`.
    Cost: That of `allgather` for each tensor; the row counts travel together.
    Thread: any.

    Example:
        >>> [t.numpy() for t in kr.grouped_allgather([[1], [2, 3]])]
        [array([1], dtype=int32), array([2, 3], dtype=int32)]
    """
    name = _name(name, "grouped_allgather")
    values = _tensors(tensors, "allgather", name)
    if not values:
        return []
    for value in values:
        if value.shape.rank == 0:
            raise ConfigError(
                f"allgather {_label(name)!r} takes tensors with at least one dimension, but got "
                "a scalar; reshape it to (1,)."
            )
        if value.dtype != values[0].dtype:
            raise ConfigError(
                f"allgather {_label(name)!r}: the tensors of a group share one dtype, but these "
                f"are {[other.dtype.name for other in values]}; make one group for each."
            )
    return list(_run(native.ops().keras_ring_allgather, x=values, tensor_name=name))


def broadcast(tensor: Tensor, root_rank: int = 0, *, name: str | None = None) -> Tensor:
    """Give every rank the root's tensor.

    Args:
        tensor: `(…)`, any numeric dtype or bool. Same shape and dtype on every rank.
        root_rank: The rank whose value is given. Defaults to 0.
        name: See `allreduce`.

    Returns:
        Same shape and dtype as `tensor`.

    Raises:
        KerasRingError: As `allreduce`; a `ConfigError` too when there is no rank `root_rank`.

    Collective: every rank calls it, in any order, under the same `name`.
    Cost: log2(P) hops; at most 2 S bytes sent per rank.
    Thread: any.

    Example:
        >>> kr.broadcast([1.5], root_rank=0).numpy()
        array([1.5], dtype=float32)
    """
    return grouped_broadcast([tensor], root_rank, name=_name(name, "broadcast"))[0]


def grouped_broadcast(
    tensors: Sequence[Tensor], root_rank: int = 0, *, name: str | None = None
) -> list[Tensor]:
    """Give every rank the root's tensors, as one request.

    Args:
        tensors: Tensors of any dtypes that `broadcast` takes.
        root_rank: See `broadcast`.
        name: See `allreduce`.

    Returns:
        A list of the results, in the order of `tensors`.

    Raises:
        KerasRingError: As `broadcast`.

    Collective: every rank calls it, in any order, under the same `name`.
    Cost: That of `broadcast` for each tensor, agreed on once.
    Thread: any.

    Example:
        >>> [t.numpy() for t in kr.grouped_broadcast([[1], [2.5]])]
        [array([1], dtype=int32), array([2.5], dtype=float32)]
    """
    name = _name(name, "grouped_broadcast")
    if not isinstance(root_rank, Integral) or not 0 <= root_rank < runtime.size():
        raise ConfigError(
            f"broadcast {_label(name)!r}: root_rank is {root_rank!r}; expected a rank from 0 to "
            f"{runtime.size() - 1}."
        )
    values = _tensors(tensors, "broadcast", name)
    if not values:
        return []
    return list(
        _run(
            native.ops().keras_ring_broadcast,
            x=values,
            tensor_name=name,
            root_rank=str(int(root_rank)),
        )
    )


def barrier(*, name: str | None = None) -> None:
    """Wait until every rank has called it.

    Args:
        name: See `allreduce`.

    Raises:
        KerasRingError: As `allreduce`.

    Collective: every rank calls it, under the same `name`.
    Cost: log2(P) hops up and down a tree of ranks; no data.
    Thread: any.

    Example:
        >>> kr.barrier()
    """
    _run(native.ops().keras_ring_barrier, tensor_name=_name(name, "barrier"))


def _name(name: str | None, kind: str) -> str:
    """Return the given name, or one that all ranks find at the same place of the same program."""
    if name is not None:
        return name
    if tf.executing_eagerly():
        return f"eager/{kind}#{kind}"
    graph = tf.compat.v1.get_default_graph()
    scope = graph.get_name_scope()
    return f"{_place(graph)}/{_count(graph, kind)}#{scope}{'/' if scope else ''}{kind}"


# TensorFlow's names of nodes, branches and bodies count what the process has built so far, and
# Keras's names of layers too, so that they differ where a rank has built more than the others. What
# a graph itself holds is counted anew in each trace.
_counters: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
_inner_places: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
_INNER_GRAPHS = ("CondBranchFuncGraph", "WhileBodyFuncGraph", "WhileCondFuncGraph")


def _count(graph: Any, kind: str) -> str:
    counter = _counters.setdefault(graph, Counter())
    counter[kind] += 1
    return f"{kind}{counter[kind]}"


def _place(graph: Any) -> str:
    """Return the function that a graph belongs to, and where in it."""
    if type(graph).__name__ not in _INNER_GRAPHS:
        return str(getattr(graph, "name", "graph"))
    if graph not in _inner_places:
        _inner_places[graph] = f"{_place(graph.outer_graph)}/{_count(graph.outer_graph, 'inner')}"
    return _inner_places[graph]


def _label(name: str) -> str:
    """Return the part of a name that messages show."""
    return name.partition("#")[2] or name


def _tensors(tensors: Sequence[Tensor], kind: str, name: str) -> list[Tensor]:
    values = [tf.convert_to_tensor(tensor) for tensor in tensors]
    for value in values:
        if value.dtype.name not in _DTYPES:
            raise ConfigError(
                f"{kind} {_label(name)!r}: dtype {value.dtype.name} is not supported; expected "
                f"one of {sorted(_DTYPES)}. For Python objects use broadcast_object or "
                "allgather_object."
            )
    return values


def _run(kernel: Any, /, **arguments: Any) -> Any:
    try:
        return kernel(**arguments)
    except tf.errors.OpError as error:
        raise from_tf(error) from None


# Gradients. The derivative is that of the sum of all ranks' losses with respect to this rank's
# input, so that it agrees with what one process would compute that held all inputs.


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
