"""Beginning, end, and who this rank is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

import keras_ring
from keras_ring import runtime
from keras_ring.errors import ConfigError
from keras_ring.horovod.common import process_sets
from keras_ring.runtime import (
    is_initialized,
    local_rank,
    local_size,
    rank,
    shutdown,
    size,
)

__all__ = [
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "rank",
    "shutdown",
    "size",
]


def init(comm: Any = None, process_sets: Any = None) -> None:
    """Join the other ranks.

    Args:
        comm: None for all, a list of ranks of the job, or an mpi4py communicator. Ranks that are
            not in the list call it too, and stay alone in worlds of their own.
        process_sets: A list of `ProcessSet`, or "dynamic", which here is always so.
    """
    if runtime.is_initialized():
        return
    sets = [] if process_sets is None or process_sets == "dynamic" else list(process_sets)
    if isinstance(comm, Sequence):
        comm = _communicator_of(list(comm))
    keras_ring.init(comm)
    for process_set in sets:
        _add(process_set)


def _add(process_set: Any) -> None:
    process_sets.add_process_set(process_set)


def _communicator_of(ranks: list[int]) -> Any:
    if not ranks:
        return None
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    own = world.Get_rank()
    is_in = own in ranks
    return world.Split(0 if is_in else 1 + own, ranks.index(own) if is_in else 0)


def cross_rank() -> int:
    """Return the number of this host."""
    return runtime.node_rank()


def cross_size() -> int:
    """Return the number of hosts."""
    return runtime.num_nodes()


def is_homogeneous() -> bool:
    """Return whether all hosts have as many ranks. Every rank calls it."""
    sizes = keras_ring.allgather_object(runtime.local_size(), name="is_homogeneous")
    return len(set(sizes)) == 1


def rank_op(name: str | None = None) -> Any:
    """Return this rank as a tensor."""
    return tf.constant(runtime.rank(), tf.int32, name=name or "rank")


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of ranks of a process set as a tensor."""
    return tf.constant(_set_of(process_set_id).size(), tf.int32, name=name or "size")


def local_rank_op(name: str | None = None) -> Any:
    """Return this rank on its host as a tensor."""
    return tf.constant(runtime.local_rank(), tf.int32, name=name or "local_rank")


def local_size_op(name: str | None = None) -> Any:
    """Return the number of ranks of this host as a tensor."""
    return tf.constant(runtime.local_size(), tf.int32, name=name or "local_size")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this rank is in a process set, else 0, as a tensor."""
    included = int(bool(_set_of(process_set_id).included()))
    return tf.constant(included, tf.int32, name=name or "process_set_included")


def _set_of(process_set_id: int) -> Any:
    from keras_ring import process_sets as sets

    if process_set_id == 0:
        return process_sets.global_process_set
    for process_set in sets.added():
        if process_set._number == process_set_id:
            return process_set
    raise ConfigError(f"there is no process set {process_set_id}.")


def mpi_threads_supported() -> bool:
    """Return whether several threads may call MPI: keras_ring needs it."""
    return True


def mpi_enabled() -> bool:
    """Return whether MPI is used, as it is wherever there is more than one rank."""
    return True


def mpi_built() -> bool:
    """Return whether MPI is built in."""
    return True


def gloo_enabled() -> bool:
    """Return whether Gloo is used: never."""
    return False


def gloo_built() -> bool:
    """Return whether Gloo is built in: no."""
    return False


def nccl_built() -> int:
    """Return the version of NCCL that is built in: 0 for none."""
    return 0


def ddl_built() -> bool:
    """Return whether DDL is built in: no."""
    return False


def ccl_built() -> bool:
    """Return whether oneCCL is built in: no."""
    return False


def cuda_built() -> bool:
    """Return whether CUDA is built in: no, tensors of a GPU are copied."""
    return False


def rocm_built() -> bool:
    """Return whether ROCm is built in: no, tensors of a GPU are copied."""
    return False


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:  # noqa: ARG001
    """Write this rank's timeline into the folder `file_path`; see `keras_ring.start_timeline`."""
    keras_ring.start_timeline(file_path)


def stop_timeline() -> None:
    """End the timeline."""
    keras_ring.stop_timeline()
