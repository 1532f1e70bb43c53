"""One trace of all ranks, for Perfetto."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

from keras_ring.launch.timeline.clock import Offset, offsets
from keras_ring.launch.timeline.files import RankTimeline, largest_group

MERGED = "merged.json"


def merge(timelines: Sequence[RankTimeline], path: Path) -> dict[str, Offset]:
    """Write the events of all timelines into one file, on one clock.

    Args:
        timelines: Those of a folder.
        path: The file, a trace in JSON; replaced if it is there.

    Returns:
        What was added to the times of each host.
    """
    clocks = offsets(largest_group(timelines))
    unknown = Offset(0.0, None)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    with partial.open("w") as file:
        file.write('{"displayTimeUnit":"ms","traceEvents":[')
        separator = "\n"
        for timeline in timelines:
            add_us = clocks.get(timeline.host, unknown).us
            for event in timeline.events:
                if "ts" in event:
                    event = {**event, "ts": round(event["ts"] + add_us, 3)}
                file.write(separator + json.dumps(event, separators=(",", ":")))
                separator = ",\n"
        file.write("\n]}\n")
    partial.replace(path)
    return clocks


def describe(clocks: dict[str, Offset]) -> list[str]:
    """Say of each host, in a sentence, how its clock was corrected."""
    sentences = []
    for host, offset in clocks.items():
        if offset.error_us is None:
            text = "its clock is taken as it is: its files do not hold the same transfers"
        elif offset.error_us == 0.0 and offset.us == 0.0:
            text = "its clock is that of the trace"
        else:
            text = f"its clock is corrected by {offset.us:+.0f} µs, ± {offset.error_us:.0f} µs"
        sentences.append(f"host {host}: {text}")
    return sentences
