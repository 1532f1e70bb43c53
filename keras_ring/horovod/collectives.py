"""Horovod's collectives on tensors, variables and objects."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

import keras_ring
from keras_ring import process_sets
from keras_ring.collectives.naming import call_name
from keras_ring.gradients import reduce_gradients
from keras_ring.horovod.common.exceptions import as_horovod_raises
from keras_ring.horovod.common.process_sets import global_process_set, native
from keras_ring.horovod.common.util import handle_average_backwards_compatibility
from keras_ring.horovod.compression import Compression, codec_of, own_compressor
from keras_ring.horovod.operations import Average, name_of
from keras_ring.reduction import Reduction


@as_horovod_raises
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor, or `tf.IndexedSlices`, over all ranks; see `keras_ring.allreduce`."""
    return grouped_allreduce(
        [tensor],
        average,
        device_dense,
        device_sparse,
        compression,
        op,
        prescale_factor,
        postscale_factor,
        process_set,
        ignore_name_scope,
        call_name(name, "allreduce"),
    )[0]


@as_horovod_raises
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",  # noqa: ARG001
    device_sparse: str = "",  # noqa: ARG001
    compression: Any = Compression.none,
    op: Any = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,  # noqa: ARG001
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors over all ranks, all or none; see `keras_ring.grouped_allreduce`."""
    wanted = name_of(handle_average_backwards_compatibility(op, average))
    name = call_name(name, "grouped_allreduce")
    results: list[Any] = list(tensors)
    sparse = [i for i, t in enumerate(results) if isinstance(t, tf.IndexedSlices)]
    if sparse:
        _check_sparse(wanted, prescale_factor, postscale_factor)
        reduction = Reduction(wanted, process_set=native(process_set))
        places = [tf.zeros(0) for _ in sparse]  # they have no variables
        slices = reduce_gradients([results[i] for i in sparse], places, reduction, scope=name)
        for i, result in zip(sparse, slices, strict=True):
            results[i] = result
    dense = [i for i in range(len(results)) if i not in sparse]
    compressor = own_compressor(compression)
    values = [tf.convert_to_tensor(results[i]) for i in dense]
    contexts: list[Any] = [None] * len(values)
    if compressor is not None:
        pairs = [compressor.compress(value) for value in values]
        values, contexts = [p[0] for p in pairs], [p[1] for p in pairs]
    reduced = keras_ring.grouped_allreduce(
        values,
        wanted,
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        compression=None if wanted == "adasum" else codec_of(compression),
        process_set=native(process_set),
    )
    for i, result, context in zip(dense, reduced, contexts, strict=True):
        results[i] = result if compressor is None else compressor.decompress(result, context)
    return results


def _check_sparse(op: str, prescale_factor: float, postscale_factor: float) -> None:
    if op == "adasum":
        raise NotImplementedError("Adasum takes no tf.IndexedSlices; use sparse_as_dense=True.")
    if op not in ("mean", "sum") or (prescale_factor, postscale_factor) != (1.0, 1.0):
        raise NotImplementedError(
            "tf.IndexedSlices are reduced with Average or Sum, and without prescale_factor and "
            "postscale_factor."
        )


@as_horovod_raises
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: Any = global_process_set,
) -> Any:
    """Concatenate all ranks' tensors; see `keras_ring.allgather`.

    The derivative is that of the mean of all ranks' losses, as Horovod's.
    """
    name = call_name(name, "allgather")
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


@as_horovod_raises
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001
    process_set: Any = global_process_set,
) -> list[Any]:
    """Concatenate several tensors of all ranks, all or none; see `allgather`."""
    inside = native(process_set)
    name = call_name(name, "grouped_allgather")
    scaled = [_with_gradient_times(1 / process_sets.size_of(inside), tensor) for tensor in tensors]
    return keras_ring.grouped_allgather(scaled, name=name, process_set=inside)


@as_horovod_raises
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001
    process_set: Any = global_process_set,
) -> Any:
    """Give every rank the root's tensor; see `keras_ring.broadcast`.

    The derivative is that of the mean of all ranks' losses, as Horovod's.
    """
    inside = native(process_set)
    scaled = _with_gradient_times(1 / process_sets.size_of(inside), tensor)
    return keras_ring.broadcast(
        scaled, root_rank, name=call_name(name, "broadcast"), process_set=inside
    )


@as_horovod_raises
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> list[Any]:
    """Give every rank's variables the root's values, and return the variables."""
    keras_ring.broadcast_variables(
        variables,
        root_rank,
        name=call_name(name, "broadcast_variables"),
        process_set=native(process_set),
    )
    return list(variables)


@as_horovod_raises
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,  # noqa: ARG001
    process_set: Any = global_process_set,
) -> Any:
    """Send each rank its rows; see `keras_ring.alltoall`."""
    name = call_name(name, "alltoall")
    if splits is not None and not tf.is_tensor(splits):
        splits = tf.convert_to_tensor(splits, tf.int32)
    return keras_ring.alltoall(tensor, splits, name=name, process_set=native(process_set))


@as_horovod_raises
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    name: str | None = None,
    process_set: Any = global_process_set,
    ignore_name_scope: bool = False,  # noqa: ARG001
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor and keep this rank's rows; see `keras_ring.reducescatter`.

    The derivative is Horovod's: `size` times that of keras_ring.
    """
    return _grouped_reducescatter(
        [tensor],
        device_dense,
        compression,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        call_name(name, "reducescatter"),
    )[0]


@as_horovod_raises
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Any = Compression.none,
    op: Any = Average,
    process_set: Any = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce several tensors and keep this rank's rows, all or none; see `reducescatter`."""
    return _grouped_reducescatter(
        tensors,
        device_dense,
        compression,
        op,
        process_set,
        prescale_factor,
        postscale_factor,
        call_name(None, "grouped_reducescatter"),
    )


def _grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str,  # noqa: ARG001
    compression: Any,
    op: Any,
    process_set: Any,
    prescale_factor: float,
    postscale_factor: float,
    name: str,
) -> list[Any]:
    inside = native(process_set)
    compressor = own_compressor(compression)
    values = [tf.convert_to_tensor(tensor) for tensor in tensors]
    contexts: list[Any] = [None] * len(values)
    if compressor is not None:
        pairs = [compressor.compress(value) for value in values]
        values, contexts = [p[0] for p in pairs], [p[1] for p in pairs]
    parts = keras_ring.grouped_reducescatter(
        [_with_gradient_times(process_sets.size_of(inside), value) for value in values],
        name_of(op),
        name=name,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        process_set=inside,
    )
    if compressor is None:
        return parts
    return [compressor.decompress(p, c) for p, c in zip(parts, contexts, strict=True)]


def _with_gradient_times(factor: float, tensor: Any) -> Any:
    """Return `tensor`; what flows back through it is multiplied."""
    value = tf.convert_to_tensor(tensor)
    if factor == 1 or not (value.dtype.is_floating or value.dtype.is_complex):
        return value

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def scaled(x: Any) -> tuple[Any, Callable[[Any], Any]]:
        return tf.identity(x), lambda upstream: upstream * tf.cast(factor, upstream.dtype)

    return scaled(value)


@as_horovod_raises
def join() -> Any:
    """Wait for the other ranks' end; see `keras_ring.join`."""
    return keras_ring.join()


@as_horovod_raises
def broadcast_variables(
    variables: Sequence[Any],
    root_rank: int,
    process_set: Any = global_process_set,
    inplace: bool = False,  # noqa: ARG001
) -> None:
    """Give every rank's variables the root's values; see `keras_ring.broadcast_variables`."""
    keras_ring.broadcast_variables(variables, root_rank, process_set=native(process_set))


@as_horovod_raises
def broadcast_object(
    obj: Any,
    root_rank: int = 0,
    session: Any = None,  # noqa: ARG001
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Any:
    """Give every rank the root's object; see `keras_ring.broadcast_object`."""
    return keras_ring.broadcast_object(
        obj, root_rank, name=name or "broadcast_object", process_set=native(process_set)
    )


def broadcast_object_fn(
    root_rank: int = 0,
    session: Any = None,
    name: str | None = None,
    process_set: Any = global_process_set,
) -> Callable[[Any], Any]:
    """Return a function of an object that does what `broadcast_object` does."""

    def broadcast_one(obj: Any) -> Any:
        return broadcast_object(obj, root_rank, session, name, process_set)

    return broadcast_one


@as_horovod_raises
def allgather_object(
    obj: Any,
    session: Any = None,  # noqa: ARG001
    name: str | None = None,
    process_set: Any = global_process_set,
) -> list[Any]:
    """Give every rank the list of all ranks' objects; see `keras_ring.allgather_object`."""
    return keras_ring.allgather_object(
        obj, name=name or "allgather_object", process_set=native(process_set)
    )
