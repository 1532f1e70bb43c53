"""Read the timelines that ranks have written, whole or cut off by a crash."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from keras_ring.errors import LaunchError

# What a transfer consists of; the rest is, of several hosts, their exchange.
STAGES = ("wait", "pack", "reduce", "unpack", "rest")
_NAME = re.compile(r"rank(\d+)(_set\d+)?(_generation\d+)?\.json")


@dataclass(frozen=True)
class Request:
    """A collective that a rank called and that then was called on all ranks.

    Args:
        name: Kind and name, such as `allreduce 'kernel'`.
        called_us: When this rank called it, in microseconds since 1970.
        ready_us: When all ranks had.
    """

    name: str
    called_us: float
    ready_us: float


@dataclass(frozen=True)
class Transfer:
    """Requests that were carried out as one.

    Args:
        name: That of the first request, and how many more there were.
        start_us: When it began, in microseconds since 1970.
        duration_us: How long it took.
        num_bytes: Bytes of this rank's tensors.
        num_requests: How many requests.
        stages_us: Microseconds in each of `STAGES`.
    """

    name: str
    start_us: float
    duration_us: float
    num_bytes: int
    num_requests: int
    stages_us: tuple[float, ...] = (0.0,) * 5

    @property
    def end_us(self) -> float:
        """When it ended."""
        return self.start_us + self.duration_us


@dataclass
class RankTimeline:
    """One rank's file.

    Args:
        path: The file.
        rank: The rank in the world.
        group: Which process set and generation the file is of; equal for the ranks of one.
        host: The name of its host.
        events: The events as the file has them, for one trace of all.
        requests: In the order in which they became ready.
        transfers: In order.
    """

    path: Path
    rank: int
    group: str
    host: str = "?"
    events: list[dict[str, Any]] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    transfers: list[Transfer] = field(default_factory=list)


def read_folder(folder: Path) -> list[RankTimeline]:
    """Read all timelines of a folder, in the order of ranks.

    Raises:
        LaunchError: There is no timeline, or a file is not one.
    """
    if not folder.is_dir():
        raise LaunchError(f"{folder}: not a folder; expected that of KERAS_RING_TIMELINE")
    paths = [path for path in folder.iterdir() if _NAME.fullmatch(path.name)]
    if not paths:
        raise LaunchError(
            f"{folder}: no timeline (rank0.json, ...) in it. Run the training with "
            "KERAS_RING_TIMELINE set to this folder."
        )
    return sorted(map(_read, paths), key=lambda timeline: (timeline.group, timeline.rank))


def largest_group(timelines: Sequence[RankTimeline]) -> list[RankTimeline]:
    """Return the timelines of the process set and generation in which most happened."""
    sizes: dict[str, int] = {}
    for timeline in timelines:
        sizes[timeline.group] = sizes.get(timeline.group, 0) + len(timeline.requests)
    largest = max(sizes, key=lambda group: (sizes[group], group == ""))
    return [timeline for timeline in timelines if timeline.group == largest]


def _read(path: Path) -> RankTimeline:
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise LaunchError(f"{path}: expected a name such as rank0.json")
    timeline = RankTimeline(path, int(match[1]), (match[2] or "") + (match[3] or ""))
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise LaunchError(f"{path}: cannot be read: {error}") from error
    if lines[:1] not in ([], ["["]):
        raise LaunchError(f"{path}: not a timeline of keras_ring: it does not begin with '['")
    called: dict[int, dict[str, Any]] = {}
    for number, line in enumerate(lines[1:], start=2):
        text = line.strip().rstrip(",")
        if text in {"", "]"}:
            continue
        try:
            event = json.loads(text)
            _take(timeline, event, called)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines):
                break  # a crash, or a full disk, has cut it off
            raise LaunchError(f"{path}, line {number}: not an event of a trace: {error}") from error
        timeline.events.append(event)
    return timeline


def _take(timeline: RankTimeline, event: dict[str, Any], called: dict[int, dict[str, Any]]) -> None:
    phase = event["ph"]
    if phase == "M" and event["name"] == "process_name":
        match = re.search(r"\(host (.*), pid \d+\)", event["args"]["name"])
        timeline.host = match[1] if match else "?"
    elif phase == "b":
        called[event["id"]] = event
    elif phase == "e" and event["id"] in called:
        begin = called.pop(event["id"])
        timeline.requests.append(Request(event["name"], float(begin["ts"]), float(event["ts"])))
    elif phase == "X":
        timeline.transfers.append(
            Transfer(
                event["name"],
                float(event["ts"]),
                float(event["dur"]),
                int(event["args"]["bytes"]),
                int(event["args"]["requests"]),
                tuple(float(event["args"].get(f"{stage}_us", 0.0)) for stage in STAGES),
            )
        )
