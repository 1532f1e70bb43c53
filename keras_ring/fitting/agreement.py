"""What the ranks that train a model together tell one another, in eager code, between the steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from keras_ring import runtime
from keras_ring.errors import ConfigError, MismatchError
from keras_ring.objects import allgather_object
from keras_ring.process_sets import ProcessSet, size_of

_NAME = "fit/agreement"


@dataclasses.dataclass(frozen=True)
class Group:
    """The ranks that train a model together.

    Args:
        who: What makes them do so, for messages.
        program: What every rank must do, for messages.
        has_own_data: Whether each rank brings batches of its own; otherwise it takes its rows of
            the joint batch, and logs are those of all ranks.
        process_set: The ranks. Defaults to all.
    """

    who: str
    program: str
    has_own_data: bool
    process_set: ProcessSet | None = None

    @property
    def ranks(self) -> Sequence[int]:
        """Their numbers in the world, in the order in which `gather` lists them."""
        return range(runtime.size()) if self.process_set is None else self.process_set.ranks

    @property
    def root(self) -> int:
        """The rank that writes, and whose state the others take over."""
        return self.ranks[0]

    @property
    def is_root(self) -> bool:
        """Whether this rank is the root."""
        return runtime.rank() == self.root

    @property
    def size(self) -> int:
        """How many ranks it has."""
        return size_of(self.process_set)


SCOPE = Group(
    who="RingStrategy",
    program="Every rank must run the same program within the scope: make the same models in the "
    "same order, and call fit, evaluate and predict together.",
    has_own_data=False,
)


def agree(group: Group, what: str, detail: Any, *, advice: str) -> None:
    """Go on only if all ranks do the same.

    All that ranks of a group do together between steps comes by here under one name, so a rank
    that does something else is found out at once and does not leave the others waiting.

    Args:
        group: Whose ranks agree.
        what: What this rank is about to do, for the message.
        detail: What must be equal on all ranks; anything that pickles and has a `repr`.
        advice: What to change if it is not.

    Raises:
        ConfigError: On every rank, with what the first two that differ do.

    Collective: every rank of the group calls it.
    """
    check_equal(group, what, gather(group, what, detail), advice=advice)


def gather(group: Group, what: str, value: Any) -> list[Any]:
    """Return what each rank has, in rank order; an error if one does something else.

    Args:
        group: Whose ranks.
        what: What this rank is about to do, for the message.
        value: Anything that pickles.

    Raises:
        ConfigError: On every rank, if one does something else.

    Collective: every rank of the group calls it.
    """
    if group.size == 1:
        return [value]
    ranks = allgather_object((what, value), name=_NAME, process_set=group.process_set)
    for other, (its_what, _) in zip(group.ranks, ranks, strict=True):
        if its_what != ranks[0][0]:
            raise ConfigError(
                f"{group.who}: rank {group.root} {ranks[0][0]} while rank {other} {its_what}. "
                f"{group.program}"
            )
    return [its_value for _, its_value in ranks]


def check_equal(group: Group, what: str, details: Sequence[Any], *, advice: str) -> None:
    """Raise for the first of the ranks' details that is not the root's.

    Args:
        group: Whose ranks.
        what: What they are about to do.
        details: One of each rank, in rank order.
        advice: What to change.
    """
    for other, detail in zip(group.ranks, details, strict=True):
        if detail != details[0]:
            raise ConfigError(
                f"{group.who}: ranks differ where each {what}: rank {group.root} has "
                f"{details[0]!r}, rank {other} has {detail!r}. {advice}"
            )


def share_error(
    group: Group, what: str, error: Exception | None, value: Any = None, *, where: str
) -> list[Any]:
    """Let no rank go on if one has failed; otherwise return what each rank has.

    Args:
        group: Whose ranks.
        what: What this rank is about to do.
        error: What this rank has failed with; None if it has not.
        value: What it has otherwise.
        where: Where an error was raised, for the message of the others.

    Raises:
        MismatchError: On the ranks that have not failed, if one has. The others raise their own.

    Collective: every rank of the group calls it.
    """
    text = None if error is None else f"{type(error).__name__}: {error}"
    ranks = gather(group, what, (value, text))
    if error is not None:
        raise error
    for other, (_, its_text) in zip(group.ranks, ranks, strict=True):
        if its_text is not None:
            raise MismatchError(
                f"{group.who}: rank {other} failed {where}, so no rank goes on: "
                f"{its_text.rstrip('.')}. Its traceback is on that rank."
            )
    return [its_value for its_value, _ in ranks]


def list_ranks(ranks: Sequence[int]) -> str:
    """Return "rank 1" or "ranks 0, 2", for messages."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
