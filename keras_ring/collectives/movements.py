"""Collectives that hand tensors on as they are, and the barrier, which hands on nothing."""

from collections.abc import Sequence
from numbers import Integral

import numpy as np
import tensorflow as tf

from keras_ring import runtime
from keras_ring.collectives.calls import Tensor, as_tensors, check_one_dtype, check_rows, run
from keras_ring.collectives.naming import call_name, label_of
from keras_ring.errors import ConfigError
from keras_ring.process_sets import ProcessSet, number_of, size_of


def allgather(
    tensor: Tensor, *, name: str | None = None, process_set: ProcessSet | None = None
) -> Tensor:
    """Concatenate the ranks' tensors along the first axis; every rank gets the result.

    Args:
        tensor: `(rows, …)`, any numeric dtype or bool. `rows` may differ between ranks and may be
            zero; the other dimensions and the dtype may not. With `jit_compile=True` all ranks
            bring as many rows.
        name: See `allreduce`.
        process_set: See `allreduce`.

    Returns:
        `(total_rows, …)`, the rows of rank 0 first.

    Raises:
        KerasRingError: As `allreduce`.

    Collective: every rank (of the set) calls it, in any order, under the same `name`.
    Cost: 2(P-1) steps; the other ranks' bytes are received once.
    Thread: any.

    Example:
        >>> kr.allgather([[1, 2]]).numpy()
        array([[1, 2]], dtype=int32)
    """
    return grouped_allgather([tensor], name=call_name(name, "allgather"), process_set=process_set)[
        0
    ]


def grouped_allgather(
    tensors: Sequence[Tensor],
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[Tensor]:
    """Gather several tensors as one request: all of them or none.

    Args:
        tensors: Tensors of one dtype, each as for `allgather`.
        name: See `allreduce`.
        process_set: See `allreduce`.

    Returns:
        A list of the results, in the order of `tensors`.

    Raises:
        KerasRingError: As `allreduce`.

    Collective: every rank (of the set) calls it, in any order, under the same `name`.
    Cost: That of `allgather` for each tensor; the row counts travel together.
    Thread: any.

    Example:
        >>> [t.numpy() for t in kr.grouped_allgather([[1], [2, 3]])]
        [array([1], dtype=int32), array([2, 3], dtype=int32)]
    """
    name = call_name(name, "grouped_allgather")
    values = as_tensors(tensors, "allgather", name)
    if not values:
        return []
    check_rows(values, "allgather", name)
    check_one_dtype(values, "allgather", name)
    return list(
        run(
            "allgather",
            x=values,
            tensor_name=name,
            process_set=number_of(process_set, f"allgather {label_of(name)!r}"),
        )
    )


def broadcast(
    tensor: Tensor,
    root_rank: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Tensor:
    """Give every rank the root's tensor.

    Args:
        tensor: `(…)`, any numeric dtype or bool. Same shape and dtype on every rank.
        root_rank: The rank whose value is given, by its number in the world. Defaults to 0.
        name: See `allreduce`.
        process_set: See `allreduce`.

    Returns:
        Same shape and dtype as `tensor`.

    Raises:
        KerasRingError: As `allreduce`; a `ConfigError` too when there is no rank `root_rank`.

    Collective: every rank (of the set) calls it, in any order, under the same `name`.
    Cost: log2(P) hops; at most 2 S bytes sent per rank.
    Thread: any.

    Example:
        >>> kr.broadcast([1.5], root_rank=0).numpy()
        array([1.5], dtype=float32)
    """
    return grouped_broadcast(
        [tensor], root_rank, name=call_name(name, "broadcast"), process_set=process_set
    )[0]


def grouped_broadcast(
    tensors: Sequence[Tensor],
    root_rank: int = 0,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> list[Tensor]:
    """Give every rank the root's tensors, as one request.

    Args:
        tensors: Tensors of any dtypes that `broadcast` takes.
        root_rank: See `broadcast`.
        name: See `allreduce`.
        process_set: See `allreduce`.

    Returns:
        A list of the results, in the order of `tensors`.

    Raises:
        KerasRingError: As `broadcast`.

    Collective: every rank (of the set) calls it, in any order, under the same `name`.
    Cost: That of `broadcast` for each tensor, agreed on once.
    Thread: any.

    Example:
        >>> [t.numpy() for t in kr.grouped_broadcast([[1], [2.5]])]
        [array([1], dtype=int32), array([2.5], dtype=float32)]
    """
    name = call_name(name, "grouped_broadcast")
    ranks = range(runtime.size()) if process_set is None else process_set.ranks
    if not isinstance(root_rank, Integral) or root_rank not in ranks:
        expected = (
            f"a rank from 0 to {ranks[-1]}" if process_set is None else f"one of {list(ranks)}"
        )
        raise ConfigError(
            f"broadcast {label_of(name)!r}: root_rank is {root_rank!r}; expected {expected}."
        )
    if root_rank == runtime.rank():
        # The root's tensor is its own result, as with tf.identity. TensorFlow may take over an
        # array's memory, which is the caller's to change.
        tensors = [x.copy() if isinstance(x, np.ndarray) else x for x in tensors]
    values = as_tensors(tensors, "broadcast", name)
    if not values:
        return []
    return list(
        run(
            "broadcast",
            x=values,
            tensor_name=name,
            process_set=number_of(process_set, f"broadcast {label_of(name)!r}"),
            root_rank=str(int(root_rank)),
        )
    )


def alltoall(
    tensor: Tensor,
    splits: Tensor | None = None,
    *,
    name: str | None = None,
    process_set: ProcessSet | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Cut a tensor into one piece for each rank, and concatenate what the ranks have for this one.

    Args:
        tensor: `(rows, …)`, any numeric dtype or bool. `rows` may differ between ranks and may be
            zero; the other dimensions and the dtype may not.
        splits: `(size,)`, int32 or int64: how many rows go to each rank, zero included; together
            all rows. Given on all ranks or on none. Defaults to as many rows for each rank.
        name: See `allreduce`.
        process_set: See `allreduce`.

    Returns:
        `(received_rows, …)`, the rows from rank 0 first. With `splits`, a tuple of that and
        `(size,)`, of the dtype of `splits`: how many rows each rank has sent.

    Raises:
        ConfigError: On every rank, when one rank's `splits` do not fit its tensor, or without
            `splits` its rows cannot be shared equally. In a function with `jit_compile=True`.
        KerasRingError: As `allreduce`.

    Collective: every rank (of the set) calls it, in any order, under the same `name`.
    Cost: P-1 steps; what goes to the others is sent once. The row counts travel before.
    Thread: any.
    Source: Bruck et al., IEEE TPDS 1997 (the direct algorithm).

    Example:
        >>> rows, received = kr.alltoall([[1, 2], [3, 4]], splits=[2])
        >>> rows.numpy(), received.numpy()
        (array([[1, 2],
               [3, 4]], dtype=int32), array([2], dtype=int32))
    """
    name = call_name(name, "alltoall")
    (value,) = as_tensors([tensor], "alltoall", name)
    check_rows([value], "alltoall", name)
    counts = None if splits is None else tf.convert_to_tensor(splits)
    if counts is not None and (counts.dtype not in (tf.int32, tf.int64) or counts.shape.rank != 1):
        raise ConfigError(
            f"alltoall {label_of(name)!r}: splits are {counts.dtype.name} of shape {counts.shape}; "
            f"expected int32 or int64 of shape ({size_of(process_set)},)."
        )
    rows, received = run(
        "alltoall",
        x=value,
        splits=tf.zeros(0, tf.int64) if counts is None else tf.cast(counts, tf.int64),
        tensor_name=name,
        process_set=number_of(process_set, f"alltoall {label_of(name)!r}"),
    )
    return rows if counts is None else (rows, tf.cast(received, counts.dtype))


def join(*, name: str | None = None) -> Tensor:
    """Wait until every rank has called it, and meanwhile let the others go on without this one.

    For uneven work: a rank that has run out of batches joins, and the others finish theirs. Until
    all have joined, this rank counts as having called whatever the others call, and brings what
    changes nothing: zeros to sums and means, ones to products, no rows to `allgather` (and so to
    sparse gradients). A mean still divides by `size()`. What would lose data is refused on every
    rank that calls it: `alltoall`, `reducescatter`, and `broadcast` from a rank that has joined.
    Collectives of process sets are not joined: their other ranks wait.

    Args:
        name: See `allreduce`.

    Returns:
        Scalar int32, the same on every rank: the rank that joined last, whose weights have seen
        every update.

    Raises:
        ConfigError: In a function with `jit_compile=True`.
        KerasRingError: As `allreduce`. `KERAS_RING_STALL_ERROR_S` counts from the last collective
            that the others ran.

    Collective: every rank calls it, after all its other collectives, under the same `name`.
    Cost: log2(P) hops; while it waits, this rank takes part in what the others run.
    Thread: any; while it waits, other threads of this rank call no collectives.

    Example:
        >>> int(kr.join())
        0
    """
    if tf.executing_eagerly():
        return run("join", tensor_name=call_name(name, "join"))
    operations = tf.compat.v1.get_default_graph().get_operations()
    with tf.control_dependencies([op for op in operations if op.type.startswith("KerasRing")]):
        return run("join", tensor_name=call_name(name, "join"))


def barrier(*, name: str | None = None, process_set: ProcessSet | None = None) -> None:
    """Wait until every rank has called it.

    Args:
        name: See `allreduce`.
        process_set: See `allreduce`.

    Raises:
        KerasRingError: As `allreduce`.

    Collective: every rank (of the set) calls it, under the same `name`.
    Cost: log2(P) hops up and down a tree of ranks; no data.
    Thread: any.

    Example:
        >>> kr.barrier()
    """
    name = call_name(name, "barrier")
    number = number_of(process_set, f"barrier {label_of(name)!r}")
    run("barrier", tensor_name=name, process_set=number)
