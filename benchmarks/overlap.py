"""Show how much of the communication of a training step runs beside the computation.

Two ranks train the MLP. keras_ring's timeline says when each transfer ran, TensorFlow's profiler
when each operation did, both by the clock of the host.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from measure import keras_ring_peer, measure
from report import text_of

Interval = tuple[float, float]


def run(folder: Path) -> None:
    """Train, print the share of transfer time that was hidden, and draw one step."""
    with tempfile.TemporaryDirectory() as name:
        traces = Path(name)
        peer = dataclasses.replace(keras_ring_peer(), environment={"KERAS_RING_TIMELINE": name})
        measure(peer, 2, {"trace": ("trace", {"folder": name, "steps": 8})})
        operations = json.loads((traces / "operations.json").read_text())
        transfers = read_timeline(traces / "rank0.json")
    begin, end = operations["step"]
    busy = union((at, at + dur) for _, at, dur in operations["operations"])
    moved = union((e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in transfers)
    busy, moved = clip(busy, begin, end), clip(moved, begin, end)
    transfer_s, hidden_s = length(moved), length(intersection(busy, moved))
    share = hidden_s / transfer_s if transfer_s else 0.0
    print(
        f"\noverlap, one step of the MLP on rank 0 of 2: {text_of(transfer_s)} of transfers in a "
        f"step of {text_of(end - begin)}; {share:.0%} of that ran beside TensorFlow's operations"
    )
    folder.mkdir(parents=True, exist_ok=True)
    result = {"step_s": end - begin, "transfer_s": transfer_s, "hidden_s": hidden_s}
    (folder / "overlap.json").write_text(json.dumps(result, indent=2) + "\n")
    draw(folder / "overlap.png", operations, transfers, share)
    print(f"written to {folder}/overlap.json and overlap.png")


def read_timeline(path: Path) -> list[dict]:
    """Return the transfers of a rank; the array of a timeline need not be closed."""
    text = path.read_text().rstrip().removesuffix(",").removesuffix("]").rstrip(",\n")
    return [event for event in json.loads(text + "]") if event.get("cat") == "transfer"]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Join intervals that touch."""
    joined: list[Interval] = []
    for begin, end in sorted(intervals):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    return joined


def clip(intervals: Sequence[Interval], begin: float, end: float) -> list[Interval]:
    """Keep what lies between two moments."""
    return intersection(intervals, [(begin, end)])


def intersection(some: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """Keep what lies in both."""
    both = ((max(a, c), min(b, d)) for a, b in some for c, d in others)
    return [(begin, end) for begin, end in both if begin < end]


def length(intervals: Iterable[Interval]) -> float:
    """Sum of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


def draw(path: Path, operations: dict, transfers: list[dict], share: float) -> None:
    """Draw the operations and the transfers of one step, one above the other."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    begin, end = operations["step"]
    figure, axes = pyplot.subplots(figsize=(10, 2.8))
    kinds = sorted({name for name, *_ in operations["operations"]})
    for i, kind in enumerate(kinds):
        bars = [(at - begin, dur) for name, at, dur in operations["operations"] if name == kind]
        axes.broken_barh(bars, (1, 0.8), facecolors=f"C{i % 8}", label=kind.lstrip("_"))
    bars = [(e["ts"] / 1e6 - begin, e["dur"] / 1e6) for e in transfers]
    bars = [(at, dur) for at, dur in bars if 0 <= at < end - begin]
    axes.broken_barh(bars, (0, 0.8), facecolors="black", label="transfer")
    axes.set_xlim(0, end - begin)
    axes.set_yticks([0.4, 1.4], ["keras_ring", "TensorFlow"])
    axes.set_xlabel("seconds since the step began")
    axes.set_title(f"one step of the MLP: {share:.0%} of transfer time is hidden", fontsize=9)
    axes.legend(fontsize=6, ncols=6, loc="upper center", bbox_to_anchor=(0.5, -0.35))
    figure.tight_layout()
    figure.savefig(path, dpi=150)
