"""Collectives that do arithmetic: every rank's tensor becomes part of the result."""

from collections.abc import Sequence
from typing import Literal, TypeAlias, get_args

from keras_ring import native
from keras_ring.collectives.calls import Tensor, as_tensors, run
from keras_ring.collectives.naming import call_name, label_of
from keras_ring.errors import ConfigError

Op: TypeAlias = Literal["mean", "sum", "min", "max", "product"]


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
        name=call_name(name, "allreduce"),
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
    name = call_name(name, "grouped_allreduce")
    if op not in get_args(Op):
        raise ConfigError(
            f"allreduce {label_of(name)!r}: op={op!r} is unknown; expected one of {get_args(Op)}."
        )
    if op not in ("mean", "sum") and (prescale_factor != 1.0 or postscale_factor != 1.0):
        raise ConfigError(
            f"allreduce {label_of(name)!r}: prescale_factor={prescale_factor} and "
            f"postscale_factor={postscale_factor} go with op='mean' or 'sum', not {op!r}."
        )
    values = as_tensors(tensors, "allreduce", name)
    if not values:
        return []
    if any(value.dtype != values[0].dtype for value in values):
        raise ConfigError(
            f"allreduce {label_of(name)!r}: the tensors of a group share one dtype, but these are "
            f"{[value.dtype.name for value in values]}; make one group for each."
        )
    return list(
        run(
            native.ops().keras_ring_allreduce,
            x=values,
            tensor_name=name,
            op=op,
            prescale_factor=repr(float(prescale_factor)),
            postscale_factor=repr(float(postscale_factor)),
        )
    )
