"""Collectives that do arithmetic: every rank's tensor becomes part of the result."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from keras_ring.collectives.calls import Tensor, as_tensors, check_one_dtype, check_rows, run
from keras_ring.collectives.naming import call_name, label_of
from keras_ring.compression import Compression, attribute_of
from keras_ring.errors import ConfigError
from keras_ring.process_sets import ProcessSet, number_of

Op: TypeAlias = Literal["mean", "sum", "min", "max", "product", "adasum"]
ScatterOp: TypeAlias = Literal["mean", "sum", "min", "max", "product"]


def allreduce(
    tensor: Tensor,
    op: Op = "mean",
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compression | None = None,
    process_set: ProcessSet | None = None,
) -> Tensor:
    """Reduce a tensor over all ranks; every rank gets the result.

    16-bit floats are summed in float32. The mean of integers is rounded down, like NumPy's
    `sum // size`. "adasum" adds what points in different directions and averages what points in
    the same: two tensors become `(1 - a·b / 2a·a) a + (1 - a·b / 2b·b) b`, ranks combine in a
    binary tree of neighbours, and a rank that is left over (the last of three) combines with the
    tree of the others.

    Args:
        tensor: `(…)`, any numeric dtype; bool with "min" and "max". Same shape and dtype on every
            rank.
        op: One of "mean", "sum", "min", "max", "product"; of floating or complex tensors "adasum".
            Defaults to "mean".
        name: What the ranks are matched by, up to the first "#"; what follows is shown in
            messages. Must be the same on all ranks. Defaults to the call's place in its
            function.
        prescale_factor: Multiplies every rank's tensor first; with "mean", "sum" and "adasum".
            Defaults to 1.
        postscale_factor: Multiplies the result; with "mean", "sum" and "adasum". Defaults to 1.
        compression: "fp16" or "bf16": between hosts float32 and float64 travel as 16 bits. Each
            transfer rounds once, to nearest: what a host (or, where ranks share no memory, a rank)
            brings, every partial sum, and the result; sums are kept in the tensor's dtype. Beyond
            65504 "fp16" gives infinity. Other dtypes, and what stays within a host, travel as they
            are. Not with "adasum". Defaults to None.
        process_set: The ranks that take part. Defaults to all.

    Returns:
        Same shape and dtype as `tensor`, the same bits on every rank.

    Raises:
        ConfigError: The operation has no meaning for the dtype, there is no such compression,
            `init` was not called, or with `jit_compile=True` a dimension is not known while the
            function is traced.
        MismatchError: Ranks disagree on shape, dtype, op or compression.
        PeerLostError: A rank has died or left.
        StallError: A rank has not called it for `KERAS_RING_STALL_ERROR_S` seconds.

    Collective: every rank (of the set) calls it, in any order, under the same `name`.
    Cost: 2(P-1) steps, 2(P-1)/P · S bytes sent per rank, half of it (float64: a quarter) with
        compression.
    Thread: any.
    Source: Patarasuk & Yuan, JPDC 2009; "adasum": Maleki et al., Scaling distributed training with
        adaptive summation, 2020.

    Example:
        >>> kr.allreduce([1.0, 2.0], "sum").numpy()
        array([1., 2.], dtype=float32)
    """
    return grouped_allreduce(
        [tensor],
        op,
        name=call_name(name, "allreduce"),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=compression,
        process_set=process_set,
    )[0]


def grouped_allreduce(
    tensors: Sequence[Tensor],
    op: Op = "mean",
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Compression | None = None,
    process_set: ProcessSet | None = None,
) -> list[Tensor]:
    """Reduce several tensors over all ranks as one request: all of them or none.

    Args:
        tensors: Tensors of one dtype.
        op: See `allreduce`.
        name: See `allreduce`.
        prescale_factor: See `allreduce`.
        postscale_factor: See `allreduce`.
        compression: See `allreduce`.
        process_set: See `allreduce`.

    Returns:
        A list of the results, in the order of `tensors`.

    Raises:
        KerasRingError: As `allreduce`.

    Collective: every rank (of the set) calls it, in any order, under the same `name`.
    Cost: That of one `allreduce` of all bytes.
    Thread: any.

    Example:
        >>> [t.numpy() for t in kr.grouped_allreduce([[1], [2, 3]], "max")]
        [array([1], dtype=int32), array([2, 3], dtype=int32)]
    """
    name = call_name(name, "grouped_allreduce")
    _check_op("allreduce", name, op, get_args(Op), prescale_factor, postscale_factor)
    codec = attribute_of(compression, f"allreduce {label_of(name)!r}")
    if op == "adasum" and compression is not None:
        raise ConfigError(
            f"allreduce {label_of(name)!r}: compression={compression!r} goes with the other "
            "operations, not with op='adasum'; leave it out."
        )
    values = as_tensors(tensors, "allreduce", name)
    if not values:
        return []
    check_one_dtype(values, "allreduce", name)
    return list(
        run(
            "allreduce",
            x=values,
            tensor_name=name,
            process_set=number_of(process_set, f"allreduce {label_of(name)!r}"),
            op=op,
            prescale_factor=repr(float(prescale_factor)),
            postscale_factor=repr(float(postscale_factor)),
            compression=codec,
        )
    )


def reducescatter(
    tensor: Tensor,
    op: ScatterOp = "mean",
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> Tensor:
    """Reduce a tensor over all ranks; each rank gets some rows of the result.

    Args:
        tensor: `(rows, …)`, any numeric dtype; bool with "min" and "max". Same shape and dtype on
            every rank.
        op: One of "mean", "sum", "min", "max", "product". Defaults to "mean".
        name: See `allreduce`.
        prescale_factor: See `allreduce`.
        postscale_factor: See `allreduce`.
        process_set: See `allreduce`.

    Returns:
        `(own_rows, …)`, of the dtype of `tensor`. The rows of rank 0 are the first; when they do
        not divide, the first `rows % size` ranks get one more than the others.

    Raises:
        KerasRingError: As `allreduce`.

    Collective: every rank (of the set) calls it, in any order, under the same `name`.
    Cost: P-1 steps, (P-1)/P · S bytes sent per rank.
    Thread: any.
    Source: Patarasuk & Yuan, JPDC 2009.

    Example:
        >>> kr.reducescatter([[1.0, 2.0], [3.0, 4.0]], "sum").numpy()
        array([[1., 2.],
               [3., 4.]], dtype=float32)
    """
    return grouped_reducescatter(
        [tensor],
        op,
        name=call_name(name, "reducescatter"),
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=process_set,
    )[0]


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    op: ScatterOp = "mean",
    *,
    name: str | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet | None = None,
) -> list[Tensor]:
    """Reduce and scatter several tensors as one request: all of them or none.

    Args:
        tensors: Tensors of one dtype, each as for `reducescatter`.
        op: See `reducescatter`.
        name: See `allreduce`.
        prescale_factor: See `allreduce`.
        postscale_factor: See `allreduce`.
        process_set: See `allreduce`.

    Returns:
        A list of the results, in the order of `tensors`.

    Raises:
        KerasRingError: As `allreduce`.

    Collective: every rank (of the set) calls it, in any order, under the same `name`.
    Cost: That of one `reducescatter` of all bytes.
    Thread: any.

    Example:
        >>> [t.numpy() for t in kr.grouped_reducescatter([[1], [2, 3]], "max")]
        [array([1], dtype=int32), array([2, 3], dtype=int32)]
    """
    name = call_name(name, "grouped_reducescatter")
    _check_op("reducescatter", name, op, get_args(ScatterOp), prescale_factor, postscale_factor)
    values = as_tensors(tensors, "reducescatter", name)
    if not values:
        return []
    check_rows(values, "reducescatter", name)
    check_one_dtype(values, "reducescatter", name)
    return list(
        run(
            "reducescatter",
            x=values,
            tensor_name=name,
            process_set=number_of(process_set, f"reducescatter {label_of(name)!r}"),
            op=op,
            prescale_factor=repr(float(prescale_factor)),
            postscale_factor=repr(float(postscale_factor)),
        )
    )


def _check_op(
    kind: str, name: str, op: str, known: tuple[str, ...], prescale: float, postscale: float
) -> None:
    if op not in known:
        raise ConfigError(
            f"{kind} {label_of(name)!r}: op={op!r} is unknown; expected one of {known}."
        )
    if op in ("min", "max", "product") and (prescale != 1.0 or postscale != 1.0):
        raise ConfigError(
            f"{kind} {label_of(name)!r}: prescale_factor={prescale} and postscale_factor="
            f"{postscale} go with op='mean' or 'sum', not {op!r}."
        )
