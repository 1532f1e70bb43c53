"""One clock for the timelines of several hosts.

Clocks of hosts differ by milliseconds, more than a transfer takes. But no rank ends an allreduce
before the last has begun it: each one bounds how far two clocks can be apart, from both sides, and
over many the bounds come close. A. Duda and others, Estimating global time in distributed systems,
ICDCS 1987.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from keras_ring.launch.timeline.files import RankTimeline

# Of these kinds every rank waits for data of every other.
_MEETINGS = ("allreduce", "barrier", "allgather", "reducescatter", "alltoall")


@dataclass(frozen=True)
class Offset:
    """What to add to the times of a host for those of the first rank's.

    Args:
        us: Microseconds to add.
        error_us: How wrong that can be at most, in microseconds; None if nothing is known.
    """

    us: float
    error_us: float | None


def offsets(timelines: Sequence[RankTimeline]) -> dict[str, Offset]:
    """Find what to add to the times of each host.

    Args:
        timelines: Those of one process set and generation, the reference first.

    Returns:
        By host; 0 with an error of 0 for the first rank's own. The error is None where the files
        do not hold the same transfers.
    """
    first = timelines[0]
    found = {first.host: Offset(0.0, 0.0)}
    for host in dict.fromkeys(timeline.host for timeline in timelines):
        if host in found:
            continue
        # Ranks of a host have one clock, so that the bounds of all of them hold.
        bounds = [_bounds(first, timeline) for timeline in timelines if timeline.host == host]
        low = max((b[0] for b in bounds if b is not None), default=None)
        high = min((b[1] for b in bounds if b is not None), default=None)
        if low is None or high is None:
            found[host] = Offset(0.0, None)
        else:
            # A clock that was set while the job ran leaves no offset that is right for all times.
            found[host] = Offset((low + high) / 2, max(high - low, low - high) / 2)
    return found


def _bounds(first: RankTimeline, other: RankTimeline) -> tuple[float, float] | None:
    """Return the least and the greatest offset that the common transfers allow."""
    low, high = float("-inf"), float("inf")
    for mine, its in zip(first.transfers, other.transfers, strict=False):
        if mine.name != its.name:
            return None
        if mine.name.startswith(_MEETINGS):
            low = max(low, mine.start_us - its.end_us)
            high = min(high, mine.end_us - its.start_us)
    return None if low == float("-inf") else (low, high)
