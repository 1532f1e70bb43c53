"""Agreeing with the other ranks, in eager code, on what is done next."""

from __future__ import annotations

from typing import Any

from keras_ring import runtime
from keras_ring.errors import ConfigError
from keras_ring.objects import allgather_object

_NAME = "strategy/agreement"


def agree(what: str, detail: Any, *, advice: str) -> None:
    """Go on only if all ranks do the same.

    All that ranks do together in a scope comes by here under one name, so a rank that does
    something else is found out at once and does not leave the others waiting.

    Args:
        what: What this rank is about to do, for the message.
        detail: What must be equal on all ranks; anything that pickles and has a `repr`.
        advice: What to change if it is not.

    Raises:
        ConfigError: On every rank, with what the first two that differ do.

    Collective: every rank calls it.
    """
    if runtime.size() == 1:
        return
    ranks = allgather_object((what, detail), name=_NAME)
    for other, (its_what, its_detail) in enumerate(ranks):
        if its_what != ranks[0][0]:
            raise ConfigError(
                f"RingStrategy: rank 0 {ranks[0][0]} while rank {other} {its_what}. Every rank "
                "must run the same program within the scope: make the same models in the same "
                "order, and call fit, evaluate and predict together."
            )
        if its_detail != ranks[0][1]:
            raise ConfigError(
                f"RingStrategy: ranks differ where each {its_what}: rank 0 has "
                f"{ranks[0][1]!r}, rank {other} has {its_detail!r}. {advice}"
            )


def gather(what: str, value: Any) -> list[Any]:
    """Return what each rank has, in rank order; an error if one does something else.

    Collective: every rank calls it.
    """
    if runtime.size() == 1:
        return [value]
    ranks = allgather_object((what, value), name=_NAME)
    for other, (its_what, _) in enumerate(ranks):
        if its_what != ranks[0][0]:
            raise ConfigError(
                f"RingStrategy: rank 0 {ranks[0][0]} while rank {other} {its_what}. Every rank "
                "must run the same program within the scope: make the same models in the same "
                "order, and call fit, evaluate and predict together."
            )
    return [its_value for _, its_value in ranks]
