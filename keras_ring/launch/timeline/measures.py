"""What a job's timelines say in numbers: steps, waits, bytes, overlap."""

from __future__ import annotations

import bisect
import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from keras_ring.launch.timeline.clock import Offset
from keras_ring.launch.timeline.files import STAGES, RankTimeline, Request


@dataclass(frozen=True)
class Measures:
    """What happened on all ranks together.

    Args:
        ranks: The ranks.
        hosts: The host of each.
        duration_s: From the first call to the last end.
        step_name: The transfer that comes once in each step; "" if none comes often.
        step_ms: The time from one such to the next, on the first rank.
        waited_s: `waited_s[a][b]`: seconds in which a collective that rank a had called waited for
            rank b, which called it last of all. Seconds in which several wait count once.
        transfer_s: Seconds that each rank was in transfers.
        stages_s: Of those, each rank's seconds in each of `files.STAGES`.
        num_bytes: Bytes of each rank's tensors that were transferred.
        overlap: The share of each rank's transfer time before the last call of its step: then its
            program computed on. None without steps.
        by_name: Of each tensor or group of tensors: transfers, bytes and seconds, the longest
            first, on the first rank.
    """

    ranks: list[int]
    hosts: list[str]
    duration_s: float
    step_name: str
    step_ms: list[float]
    waited_s: list[list[float]]
    transfer_s: list[float]
    stages_s: list[list[float]]
    num_bytes: list[int]
    overlap: list[float | None]
    by_name: list[tuple[str, int, int, float]]

    @property
    def caused_s(self) -> list[float]:
        """Seconds that the others waited for each rank, on average over those others."""
        others = max(len(self.ranks) - 1, 1)
        return [sum(row[b] for row in self.waited_s) / others for b in range(len(self.ranks))]


def measure(timelines: Sequence[RankTimeline], clocks: Mapping[str, Offset]) -> Measures:
    """Measure the timelines of one process set and generation.

    Args:
        timelines: In the order of ranks.
        clocks: What to add to the times of each host.
    """
    first = timelines[0]
    starts = [r.called_us + clocks[t.host].us for t in timelines for r in t.requests]
    ends = [x.end_us + clocks[t.host].us for t in timelines for x in t.transfers]
    step_name = _step_name(first)
    marks = [x.start_us for x in first.transfers if x.name == step_name]
    sums: dict[str, list[float]] = defaultdict(lambda: [0, 0, 0.0])
    for x in first.transfers:
        total = sums[x.name]
        total[0] += 1
        total[1] += x.num_bytes
        total[2] += x.duration_us / 1e6
    by_name = [(name, int(n), int(b), s) for name, (n, b, s) in sums.items()]
    return Measures(
        ranks=[t.rank for t in timelines],
        hosts=[t.host for t in timelines],
        duration_s=(max(ends + starts) - min(starts + ends)) / 1e6 if starts + ends else 0.0,
        step_name=step_name,
        step_ms=[(b - a) / 1e3 for a, b in itertools.pairwise(marks)],
        waited_s=_waits(timelines, clocks),
        transfer_s=[sum(x.duration_us for x in t.transfers) / 1e6 for t in timelines],
        stages_s=[_stages(t) for t in timelines],
        num_bytes=[sum(x.num_bytes for x in t.transfers) for t in timelines],
        overlap=[_overlap(t, step_name) for t in timelines],
        by_name=sorted(by_name, key=lambda row: -row[3]),
    )


def _step_name(timeline: RankTimeline) -> str:
    """Choose the transfer of a step: of those that come most often, the one that moves most."""
    counts: dict[str, int] = defaultdict(int)
    sizes: dict[str, int] = defaultdict(int)
    for x in timeline.transfers:
        if x.name.startswith("allreduce"):
            counts[x.name] += 1
            sizes[x.name] += x.num_bytes
    often = [name for name, count in counts.items() if count >= 3]
    return max(often, key=lambda name: sizes[name], default="")


def _waits(timelines: Sequence[RankTimeline], clocks: Mapping[str, Offset]) -> list[list[float]]:
    intervals: list[list[tuple[float, float, int]]] = [[] for _ in timelines]
    calls = [_calls(timeline, clocks[timeline.host].us) for timeline in timelines]
    for key in calls[0]:
        if not all(key in own for own in calls):
            continue
        at = [own[key] for own in calls]
        last = max(range(len(at)), key=at.__getitem__)
        for a, called_us in enumerate(at):
            if a != last:
                intervals[a].append((called_us, at[last], last))
    return [_lengths(own, len(timelines)) for own in intervals]


def _lengths(intervals: list[tuple[float, float, int]], num_ranks: int) -> list[float]:
    """Return the seconds of each rank's intervals; what several cover is the earliest one's."""
    lengths = [0.0] * num_ranks
    covered_us = float("-inf")
    for start_us, end_us, rank in sorted(intervals):
        lengths[rank] += max(end_us - max(start_us, covered_us), 0.0) / 1e6
        covered_us = max(covered_us, end_us)
    return lengths


def _calls(timeline: RankTimeline, add_us: float) -> dict[tuple[str, int], float]:
    """Return when each request was called, by its name and how often it had been before."""
    counts: dict[str, int] = defaultdict(int)
    calls = {}
    for request in sorted(timeline.requests, key=_called):
        calls[request.name, counts[request.name]] = request.called_us + add_us
        counts[request.name] += 1
    return calls


def _called(request: Request) -> float:
    return request.called_us


def _stages(timeline: RankTimeline) -> list[float]:
    return [sum(x.stages_us[i] for x in timeline.transfers) / 1e6 for i in range(len(STAGES))]


def _overlap(timeline: RankTimeline, step_name: str) -> float | None:
    ends = [x.end_us for x in timeline.transfers if x.name == step_name]
    if len(ends) < 3:
        return None
    # Tiny ones beside it are not gradients of the same backward pass, but what ranks agree on.
    least = max(x.num_bytes for x in timeline.transfers if x.name == step_name) / 100
    called = sorted(r.called_us for r in timeline.requests if r.name.startswith("allreduce"))
    hidden = total = 0.0
    for x in timeline.transfers:
        step = bisect.bisect_left(ends, x.end_us)
        if not 0 < step < len(ends) or not x.name.startswith("allreduce"):
            continue
        if x.num_bytes < least:
            continue
        # The last call before the step's end is that of the gradient which comes last.
        last_call = called[max(bisect.bisect_right(called, ends[step]) - 1, 0)]
        total += x.duration_us
        hidden += min(max(last_call - x.start_us, 0.0), x.duration_us)
    return hidden / total if total else None


def typical_step_ms(measures: Measures) -> float | None:
    """Return the median time of a step; None without steps."""
    return statistics.median(measures.step_ms) if measures.step_ms else None
