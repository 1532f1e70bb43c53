"""Collectives on values, as Horovod's Keras modules have them: arrays in, arrays out."""

from __future__ import annotations

from typing import Any

import keras_ring
from keras_ring.horovod import collectives
from keras_ring.horovod.common.exceptions import as_horovod_raises
from keras_ring.horovod.compression import Compression, codec_of
from keras_ring.horovod.gone import refuse_graph_value
from keras_ring.horovod.operations import Average


def reduce(
    value: Any,
    name: str | None,
    average: bool | None,
    prescale_factor: float,
    postscale_factor: float,
    op: Any,
    compression: Any,
) -> Any:
    """Reduce a value over all ranks.

    Args:
        value: An array or a number.
        name: See `keras_ring.allreduce`.
        average: Older than `op`; one of them.
        prescale_factor: See `keras_ring.allreduce`.
        postscale_factor: See `keras_ring.allreduce`.
        op: One of Horovod's operations.
        compression: A `Compression`.
    """
    refuse_graph_value(value, "allreduce")
    result = collectives.allreduce(
        value,
        average,
        compression=compression,
        op=op,
        prescale_factor=prescale_factor,
        postscale_factor=postscale_factor,
        name=name,
    )
    return result.numpy()


def allreduce(
    value: Any,
    name: str | None = None,
    average: bool | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    op: Any = None,
    compression: Any = Compression.none,
) -> Any:
    """Reduce a value over all ranks."""
    return reduce(value, name, average, prescale_factor, postscale_factor, op, compression)


def allgather(value: Any, name: str | None = None) -> Any:
    """Concatenate all ranks' arrays."""
    refuse_graph_value(value, "allgather")
    return collectives.allgather(value, name).numpy()


def broadcast(value: Any, root_rank: int, name: str | None = None) -> Any:
    """Give every rank the root's value."""
    refuse_graph_value(value, "broadcast")
    return collectives.broadcast(value, root_rank, name).numpy()


def reducescatter(value: Any, name: str | None = None, op: Any = Average) -> Any:
    """Reduce an array and keep this rank's rows."""
    refuse_graph_value(value, "reducescatter")
    return collectives.reducescatter(value, op=op, name=name).numpy()


@as_horovod_raises
def load_model(
    filepath: Any,
    custom_optimizers: Any = None,
    custom_objects: Any = None,
    compression: Any = Compression.none,
    legacy_opts: bool = False,  # noqa: ARG001
) -> Any:
    """Load a model and distribute its optimizer; see `keras_ring.load_model`."""
    objects = dict(custom_objects or {})
    objects |= {optimizer.__name__: optimizer for optimizer in custom_optimizers or ()}
    return keras_ring.load_model(
        filepath, compression=codec_of(compression), custom_objects=objects or None
    )
