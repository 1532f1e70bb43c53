"""Adding and removing process sets, which all ranks of the world agree on."""

from collections.abc import Iterable

from keras_ring import process_sets, runtime
from keras_ring.errors import ConfigError, MismatchError
from keras_ring.objects import allgather_object
from keras_ring.process_sets import ProcessSet


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a process set usable; at any time, also while training runs.

    Args:
        process_set: One that has not been added, or its ranks.

    Returns:
        The set, on every rank, whether in it or not.

    Raises:
        ConfigError: There is no such rank, or the set has been added before.
        MismatchError: Ranks disagree on the ranks of the set.
        KerasRingError: As `keras_ring.allreduce`.

    Collective: every rank of the world calls it, for the same sets in the same order.
    Cost: Two allgathers and a communicator; then a thread, which sleeps, and an arena of 1 MiB
        (between hosts at least 8 MiB) on each rank of the set.
    Thread: main thread only.

    Example:
        >>> evens = kr.add_process_set(range(0, kr.size(), 2))
        >>> evens.included()
        True
        >>> kr.remove_process_set(evens)
    """
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _agree("add_process_set", process_set, process_set.is_added)
    if process_set.is_added:
        raise ConfigError(f"add_process_set: {process_set!r} has been added already.")
    if process_set.ranks[-1] >= runtime.size():
        raise ConfigError(
            f"add_process_set: {process_set!r} has rank {process_set.ranks[-1]}; expected ranks "
            f"from 0 to {runtime.size() - 1}."
        )
    process_sets.start(process_set)
    return process_set


def remove_process_set(process_set: ProcessSet) -> None:
    """Take a process set away; its ranks may be added again.

    Waits until all ranks have called it. Collectives of the set that still wait end with an error.

    Args:
        process_set: One that has been added.

    Raises:
        ConfigError: It has not been added, or has been removed.
        MismatchError: Ranks disagree on the ranks of the set.
        KerasRingError: As `keras_ring.allreduce`.

    Collective: every rank of the world calls it, for the same sets in the same order.
    Cost: Two allgathers and a barrier of the set.
    Thread: main thread only.

    Example:
        >>> kr.remove_process_set(kr.add_process_set([0]))
    """
    _agree("remove_process_set", process_set, process_set.is_added)
    if not process_set.is_added:
        raise ConfigError(f"remove_process_set: {process_set!r} is not there.")
    process_sets.stop(process_set)


def _agree(what: str, process_set: ProcessSet, is_added: bool) -> None:
    """Raise on every rank unless all mean the same set in the same state."""
    mine = (process_set.ranks, is_added)
    of_ranks = allgather_object(mine, name=what)
    if any(theirs != mine for theirs in of_ranks):
        texts = [
            f"rank {rank} has {list(ranks)}{' (added)' if was_added else ''}"
            for rank, (ranks, was_added) in enumerate(of_ranks)
        ]
        raise MismatchError(
            f"{what}: ranks disagree on the set: {', '.join(texts)}. Every rank of the world adds "
            "and removes the same sets in the same order, those it is not in too."
        )


@runtime.on_init
def _add_those_given_to_init() -> None:
    for process_set in runtime.take_initial_process_sets():
        add_process_set(process_set)
