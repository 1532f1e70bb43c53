"""Parts of the ranks whose collectives run beside one another."""

import itertools
from collections.abc import Iterable
from typing import Any

from keras_ring import native, runtime
from keras_ring.errors import ConfigError


class ProcessSet:
    """Some of the ranks; `process_set=` of a collective makes it theirs alone.

    Make one from its ranks, the same on every rank, and add it (`add_process_set`, or
    `init(process_sets=...)`). Collectives of different sets run beside one another, in any order,
    whether or not the sets share ranks. Roots are given by their rank in the world, and so are the
    ranks in messages; where the order of ranks matters (`allgather`, `alltoall`, `reducescatter`)
    it is the order of `ranks`.

    Args:
        ranks: Ranks of the world, in any order; each at most once.

    Raises:
        ConfigError: There is no rank in it, or one is there twice or is no rank.

    Example:
        >>> first = kr.add_process_set([0])
        >>> kr.allreduce([3.0], process_set=first).numpy()
        array([3.], dtype=float32)
        >>> kr.remove_process_set(first)
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        """Note the ranks; no other rank hears of it."""
        given = list(ranks)
        self.ranks: tuple[int, ...] = tuple(sorted(int(rank) for rank in given))
        if not given or len(set(self.ranks)) < len(given) or self.ranks[0] < 0:
            raise ConfigError(
                f"ProcessSet: the ranks are {given}; expected at least one, from 0 on, each once."
            )
        self._number: int | None = None

    def __repr__(self) -> str:
        """Return how it was made."""
        return f"ProcessSet({list(self.ranks)})"

    def included(self) -> bool:
        """Return whether this rank is in it."""
        return runtime.rank() in self.ranks

    def rank(self) -> int:
        """Return this rank's place in `ranks`.

        Raises:
            ConfigError: This rank is not in it.
        """
        if not self.included():
            raise ConfigError(
                f"rank {runtime.rank()} is not in {self!r}; ask included() before what only the "
                "set's ranks do."
            )
        return self.ranks.index(runtime.rank())

    def size(self) -> int:
        """Return the number of its ranks."""
        return len(self.ranks)

    @property
    def is_added(self) -> bool:
        """Whether collectives may run in it: it was added, and neither removed nor shut down."""
        return self._number is not None and _added.get(self._number) is self


# By the number that ops know them by in this process. Numbers are not used again, so that a graph
# traced before a set was removed does not find another one.
_added: dict[int, ProcessSet] = {}
_numbers = itertools.count(1)


def number_of(process_set: ProcessSet | None, what: str) -> str:
    """Return the attribute of an op that is called in a set; None is the world.

    Args:
        process_set: Where the collective is called.
        what: The collective and its name, for messages.

    Raises:
        ConfigError: The set is not there, or this rank is not in it.
    """
    if process_set is None:
        return "0"
    if not process_set.is_added:
        raise ConfigError(
            f"{what}: {process_set!r} has not been added, or has been removed; call "
            "keras_ring.add_process_set on every rank first."
        )
    if not process_set.included():
        raise ConfigError(
            f"{what}: rank {runtime.rank()} called it in {process_set!r}, which it is not in. Call "
            "it on the set's ranks only (process_set.included())."
        )
    return str(process_set._number)


def of_op(op: Any) -> ProcessSet | None:
    """Return the set that an op was made for.

    Args:
        op: One of our ops in a graph or on a tape.
    """
    number = int(op.get_attr("process_set"))
    return _added[number] if number else None


def added() -> list[ProcessSet]:
    """Return the sets that are there."""
    return list(_added.values())


def rank_in(process_set: ProcessSet | None) -> int:
    """Return this rank's place in a set; None is the world."""
    return runtime.rank() if process_set is None else process_set.rank()


def size_of(process_set: ProcessSet | None) -> int:
    """Return how many ranks a set has; None is the world."""
    return runtime.size() if process_set is None else process_set.size()


def start(process_set: ProcessSet) -> None:
    """Start the engine of a set whose ranks have all agreed to call this.

    Args:
        process_set: Not added yet.
    """
    number = next(_numbers)
    if process_set.included():
        runtime.start_process_set(number, process_set.ranks)
    process_set._number = number
    _added[number] = process_set


def stop(process_set: ProcessSet) -> None:
    """Stop the engine of a set; its other ranks are waited for.

    Args:
        process_set: One that has been added.
    """
    number = process_set._number
    process_set._number = None
    if number is not None and _added.pop(number, None) is not None and process_set.included():
        native.stop(number)


@runtime.on_shutdown
def _stop_all() -> None:
    # In the same order on every rank, since each waits for its others.
    for number in sorted(_added):
        stop(_added[number])
