"""Horovod's process sets."""

from __future__ import annotations

from typing import Any

from keras_ring import process_set_changes, process_sets, runtime
from keras_ring.errors import ConfigError
from keras_ring.horovod.common.exceptions import as_horovod_raises


class ProcessSet:
    """Some of the ranks, given as a list or by an mpi4py communicator.

    Before it has been added, `process_set_id`, `rank()`, `size()` and `included()` are None.
    """

    def __init__(self, ranks_or_comm: Any) -> None:
        """Note the ranks."""
        self.mpi_comm = None
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
            ranks_or_comm = _ranks_of(ranks_or_comm)
        self._native: process_sets.ProcessSet | None = process_sets.ProcessSet(ranks_or_comm)

    @property
    def ranks(self) -> list[int] | None:
        """Ranks of the world, ascending."""
        native = self._native
        if native is None:
            return list(range(runtime.size())) if runtime.is_initialized() else None
        return list(native.ranks)

    @property
    def process_set_id(self) -> int | None:
        """A number of its own in this process; 0 is the world."""
        if self._native is None:
            return 0
        return self._native._number if self._native.is_added else None

    def size(self) -> int | None:
        """Return the number of its ranks."""
        return None if not self._is_there() else process_sets.size_of(self._native)

    def rank(self) -> int | None:
        """Return this rank's place in it; None outside."""
        return process_sets.rank_in(self._native) if self.included() else None

    def included(self) -> bool | None:
        """Return whether this rank is in it."""
        if not self._is_there():
            return None
        return self._native is None or self._native.included()

    def _is_there(self) -> bool:
        return runtime.is_initialized() and (self._native is None or self._native.is_added)

    def __repr__(self) -> str:
        """Return its id and ranks."""
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


def _ranks_of(comm: Any) -> list[int]:
    from mpi4py import MPI

    world = MPI.COMM_WORLD.Get_group()
    group = comm.Get_group()
    return list(group.Translate_ranks(list(range(group.Get_size())), world))


def _make_global() -> ProcessSet:
    everyone = ProcessSet.__new__(ProcessSet)
    everyone.mpi_comm = None
    everyone._native = None
    return everyone


global_process_set = _make_global()


def native(process_set: Any) -> process_sets.ProcessSet | None:
    """Return what the collectives of keras_ring take."""
    if process_set is None or isinstance(process_set, process_sets.ProcessSet):
        return process_set
    if not isinstance(process_set, ProcessSet):
        raise ConfigError(f"process_set is {process_set!r}; expected a ProcessSet.")
    return process_set._native


@as_horovod_raises
def add_process_set(process_set: Any) -> ProcessSet:
    """Make a process set usable; every rank of the world calls it.

    Args:
        process_set: A `ProcessSet` or a list of ranks.

    Raises:
        ValueError: The set has been added.
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    if process_set._native is None or process_set.ranks in _all_ranks():
        raise ConfigError(
            f"add_process_set: there is a process set of the ranks {process_set.ranks}."
        )
    added: ProcessSet = process_set
    process_set_changes.add_process_set(process_set._native)
    return added


@as_horovod_raises
def remove_process_set(process_set: ProcessSet) -> bool:
    """Take a process set away; every rank of the world calls it.

    Returns:
        False for the global set and for one that has not been added.
    """
    if process_set._native is None or not process_set._native.is_added:
        return False
    process_set_changes.remove_process_set(process_set._native)
    return True


def _all_ranks() -> list[list[int]]:
    return [list(range(runtime.size())), *(list(s.ranks) for s in process_sets.added())]
