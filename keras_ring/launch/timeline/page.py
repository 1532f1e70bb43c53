"""The report: one page of HTML, with everything in it, for somebody who has never seen a trace."""

from __future__ import annotations

import html
from collections.abc import Sequence

from keras_ring.launch.timeline import charts
from keras_ring.launch.timeline.files import STAGES
from keras_ring.launch.timeline.measures import Measures, typical_step_ms

_MOST_NAMES = 15
_MOST_RANKS_OF_MATRIX = 48
# A rank is called slow when the others wait for it for so much of the time, and longer than usual.
_SLOW_SHARE = 0.05

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 900px; margin: 2em auto; }
h1 { font-size: 24px; } h2 { font-size: 18px; margin-top: 2em; }
svg { display: block; margin: 0.5em 0; font: 12px system-ui, sans-serif; max-width: 100%; }
.end { text-anchor: end; } .middle { text-anchor: middle; }
.grid { stroke: #ddd; } .mark { stroke: #c60; stroke-dasharray: 5 4; }
.line { fill: none; stroke: #2266aa; stroke-width: 1.2; }
.wait { fill: #d9822b; } .transfer { fill: #2266aa; } .rest { fill: #cfd8dc; }
.stage-wait { fill: #d9822b; } .stage-pack { fill: #2266aa; } .stage-reduce { fill: #2a9d6f; }
.stage-unpack { fill: #7fb2e5; } .stage-rest { fill: #cfd8dc; }
.key { display: inline-block; width: 0.8em; height: 0.8em; margin: 0 0.3em 0 1em; }
table { border-collapse: collapse; font-size: 13px; }
td, th { padding: 2px 12px 2px 0; text-align: right; } td:first-child, th:first-child
{ text-align: left; max-width: 480px; overflow-wrap: anywhere; }
.note { color: #666; font-size: 13px; }
"""


def render(measures: Measures, clocks: Sequence[str]) -> str:
    """Write the page.

    Args:
        measures: What to show.
        clocks: Sentences on the clocks of the hosts.

    Returns:
        HTML that needs no other file and no network.
    """
    sections = [
        _section("In short", "".join(f"<p>{html.escape(s)}</p>" for s in sentences(measures))),
        _steps(measures),
        _shares(measures),
        _waits(measures),
        _stages(measures),
        _names(measures),
        _section("Clocks", "".join(f'<p class="note">{html.escape(text)}</p>' for text in clocks)),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        f"<title>Training on {len(measures.ranks)} ranks</title><style>{_STYLE}</style></head>"
        f"<body><h1>Training on {len(measures.ranks)} ranks</h1>{''.join(sections)}</body></html>\n"
    )


def sentences(measures: Measures) -> list[str]:
    """Say what the pictures show, in plain sentences."""
    size, hosts = len(measures.ranks), len(set(measures.hosts))
    text = [
        f"{size} rank{'s' * (size != 1)} on {hosts} host{'s' * (hosts != 1)} exchanged tensors "
        f"over {measures.duration_s:.3g} s. Each transferred {_bytes(max(measures.num_bytes))} in "
        f"{max(measures.transfer_s):.3g} s, {_percent(max(measures.transfer_s), measures)} of the "
        "time."
    ]
    step_ms = typical_step_ms(measures)
    if step_ms is not None:
        text.append(f"A step typically took {step_ms:.3g} ms; there were {len(measures.step_ms)}.")
    text.append(_slowest(measures))
    overlaps = [share for share in measures.overlap if share is not None]
    if overlaps:
        text.append(
            f"{100 * sum(overlaps) / len(overlaps):.0f} % of the transfers' time lay before the "
            "last gradient of its step was there: the program computed on beside them."
        )
    return text


def _slowest(measures: Measures) -> str:
    caused = measures.caused_s
    if len(caused) < 2:
        return "One rank waits for nobody."
    slowest = max(range(len(caused)), key=caused.__getitem__)
    share = caused[slowest] / measures.duration_s if measures.duration_s else 0.0
    if share < _SLOW_SHARE or caused[slowest] < 1.5 * sum(caused) / len(caused):
        return (
            "No rank is much slower than the others: they waited for one another about equally, "
            f"for {_percent(max(sum(row) for row in measures.waited_s), measures)} of the time at "
            "most."
        )
    return (
        f"Rank {measures.ranks[slowest]} on host {measures.hosts[slowest]} is the slowest: the "
        f"others waited {caused[slowest]:.3g} s for it, {_percent(caused[slowest], measures)} of "
        "the time. Look there: its share of the data, its input pipeline, or what else runs on "
        "its host."
    )


def _steps(measures: Measures) -> str:
    step_ms = typical_step_ms(measures)
    if step_ms is None:
        return _section("Time of a step", "<p>No allreduce came often enough to tell steps.</p>")
    limit_ms = charts.LINES_LIMIT * step_ms
    cut = (
        f" The longest took {max(measures.step_ms):.3g} ms; the axis ends at {limit_ms:.3g} ms."
        if max(measures.step_ms) > limit_ms
        else ""
    )
    chart = charts.lines(measures.step_ms, unit="ms", axis="step", marked=step_ms)
    return _section(
        "Time of a step",
        f"<p>From one {html.escape(measures.step_name)} to the next, on rank {measures.ranks[0]}. "
        "The dashed line is the median. A regular peak is something that the program does now and "
        f"then, such as saving or the end of an epoch.{cut}</p>{chart}",
    )


def _shares(measures: Measures) -> str:
    rows = []
    for i, rank in enumerate(measures.ranks):
        transfer, wait = measures.transfer_s[i], sum(measures.waited_s[i])
        rest = max(measures.duration_s - transfer - wait, 0.0)
        rows.append(
            (
                f"rank {rank}",
                [
                    (transfer, "transfer", f"in transfers: {transfer:.3g} s"),
                    (wait, "wait", f"waiting for other ranks: {wait:.3g} s"),
                    (rest, "rest", f"neither: {rest:.3g} s"),
                ],
            )
        )
    key = _key(
        ("transfer", "in transfers"),
        ("wait", "a collective waits for another rank"),
        ("rest", "neither"),
    )
    return _section(
        "What each rank did",
        f"<p>{key}</p>{charts.bars(rows, unit='s')}<p class='note'>While a collective waits, or is "
        "transferred, the program may compute on, so these seconds are not all lost.</p>",
    )


def _waits(measures: Measures) -> str:
    labels = [f"rank {rank}" for rank in measures.ranks]
    if len(labels) < 2:
        return ""
    rows = [
        (label, [(seconds, "wait", f"the others waited {seconds:.3g} s for {label}")])
        for label, seconds in zip(labels, measures.caused_s, strict=True)
    ]
    content = (
        "<p>How long the others waited for each rank, because it called a collective last:</p>"
        + charts.bars(rows, unit="s")
    )
    if len(labels) <= _MOST_RANKS_OF_MATRIX:
        content += "<p>Seconds that the rank of a row waited for the rank of a column:</p>"
        content += charts.matrix(labels, measures.waited_s, unit="s")
    return _section("Who waited for whom", content)


def _stages(measures: Measures) -> str:
    between = "exchange between hosts" if len(set(measures.hosts)) > 1 else "other"
    texts = {
        "wait": "waiting for ranks of the host",
        "pack": "packing into shared memory",
        "reduce": "adding up",
        "unpack": "copying results out",
        "rest": between,
    }
    rows = [
        (
            f"rank {rank}",
            [
                (seconds, f"stage-{stage}", f"{texts[stage]}: {seconds:.3g} s")
                for stage, seconds in zip(STAGES, measures.stages_s[i], strict=True)
            ],
        )
        for i, rank in enumerate(measures.ranks)
    ]
    key = _key(*((f"stage-{stage}", texts[stage]) for stage in STAGES))
    return _section("What transfers consist of", f"<p>{key}</p>{charts.bars(rows, unit='s')}")


def _key(*entries: tuple[str, str]) -> str:
    return "".join(
        f'<svg class="key" viewBox="0 0 9 9"><rect class="{kind}" width="9" height="9"/></svg>'
        f"{html.escape(text)}"
        for kind, text in entries
    )


def _names(measures: Measures) -> str:
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{count}</td><td>{_bytes(num_bytes)}</td>"
        f"<td>{seconds * 1e3:.3g} ms</td><td>{_speed(num_bytes, seconds)}</td></tr>"
        for name, count, num_bytes, seconds in measures.by_name[:_MOST_NAMES]
    )
    left = len(measures.by_name) - _MOST_NAMES
    more = f'<p class="note">and {left} more with less time</p>' if left > 0 else ""
    return _section(
        "What was transferred",
        f"<p>On rank {measures.ranks[0]}, the longest first. Small tensors travel together.</p>"
        "<table><tr><th>tensors</th><th>transfers</th><th>bytes</th><th>time</th><th>speed</th>"
        f"</tr>{rows}</table>{more}",
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{html.escape(title)}</h2>{content}</section>"


def _percent(seconds: float, measures: Measures) -> str:
    share = seconds / measures.duration_s if measures.duration_s else 0.0
    return f"{100 * share:.0f} %"


def _bytes(count: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.3g} {unit}"


def _speed(num_bytes: int, seconds: float) -> str:
    return f"{num_bytes / seconds / 1e6:.3g} MB/s" if seconds else ""
