"""Pictures of a report, as SVG within HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

WIDTH = 860
LINES_LIMIT = 5
_LEFT = 110
_ROW = 26
_MOST_POINTS = 400


def lines(values: Sequence[float], *, unit: str, axis: str, marked: float) -> str:
    """Draw values in their order, with a dashed line at `marked`.

    Of many values each point is the largest of its part, so that no peak is lost. The axis ends at
    `LINES_LIMIT` times `marked`.
    """
    height, bottom = 220, 30
    per_point = -(-len(values) // _MOST_POINTS)
    points = [max(values[i : i + per_point]) for i in range(0, len(values), per_point)]
    # A first step that is traced and compiled takes a hundred times as long as those that follow.
    limit = min(max(points), LINES_LIMIT * marked) or 1.0
    width = WIDTH - _LEFT - 10

    def x(i: int) -> float:
        return _LEFT + width * (i / max(len(points) - 1, 1))

    def y(value: float) -> float:
        return 10 + (height - bottom - 10) * (1 - min(value, limit) / limit)

    path = " ".join(f"{x(i):.1f},{y(value):.1f}" for i, value in enumerate(points))
    ticks = "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - 10}" y1="{y(v):.1f}" y2="{y(v):.1f}"/>'
        f'<text x="{_LEFT - 8}" y="{y(v) + 4:.1f}" class="end">{v:.3g} {unit}</text>'
        for v in (0.0, limit / 2, limit)
    )
    return _svg(
        height,
        f'{ticks}<polyline class="line" points="{path}"/>'
        f'<line class="mark" x1="{_LEFT}" x2="{WIDTH - 10}" y1="{y(marked):.1f}" '
        f'y2="{y(marked):.1f}"/>'
        f'<text x="{_LEFT}" y="{height - 6}">{html.escape(axis)} 1</text>'
        f'<text x="{WIDTH - 10}" y="{height - 6}" class="end">{len(values)}</text>',
    )


def bars(rows: Sequence[tuple[str, Sequence[tuple[float, str, str]]]], *, unit: str) -> str:
    """Draw a bar of parts for each row.

    Args:
        rows: A label, and for each part its length, its CSS class and what it is, for the pointer.
        unit: The unit of the lengths.
    """
    most = max((sum(part[0] for part in parts) for _, parts in rows), default=0.0) or 1.0
    width = WIDTH - _LEFT - 90
    drawn = []
    for i, (label, parts) in enumerate(rows):
        top, left = 6 + i * _ROW, float(_LEFT)
        drawn.append(
            f'<text x="{_LEFT - 8}" y="{top + 14}" class="end">{html.escape(label)}</text>'
        )
        for length, kind, title in parts:
            extent = width * length / most
            drawn.append(
                f'<rect class="{kind}" x="{left:.1f}" y="{top}" width="{max(extent, 0.0):.1f}" '
                f'height="{_ROW - 8}"><title>{html.escape(title)}</title></rect>'
            )
            left += extent
        total = sum(part[0] for part in parts)
        drawn.append(f'<text x="{left + 6:.1f}" y="{top + 14}">{total:.3g} {unit}</text>')
    return _svg(len(rows) * _ROW + 12, "".join(drawn))


def matrix(labels: Sequence[str], values: Sequence[Sequence[float]], *, unit: str) -> str:
    """Draw a square of cells, darker the larger; row by row."""
    most = max((value for row in values for value in row), default=0.0) or 1.0
    cell = max(min((WIDTH - _LEFT) // max(len(labels), 1), 64), 12)
    height = min(cell, 30)
    drawn = []
    for i, row in enumerate(values):
        top = 24 + i * height
        drawn.append(
            f'<text x="{_LEFT - 8}" y="{top + height / 2 + 4}" class="end">'
            f"{html.escape(labels[i])}</text>"
        )
        for j, value in enumerate(row):
            left = _LEFT + j * cell
            title = f"{labels[i]} waited {value:.3g} {unit} for {labels[j]}"
            drawn.append(
                f'<rect class="wait" fill-opacity="{value / most:.3f}" x="{left}" y="{top}" '
                f'width="{cell - 1}" height="{height - 1}">'
                f"<title>{html.escape(title)}</title></rect>"
            )
            if cell >= 40:
                drawn.append(
                    f'<text x="{left + cell / 2}" y="{top + height / 2 + 4}" class="middle">'
                    f"{value:.2g}</text>"
                )
    for j, label in enumerate(labels):
        if cell >= 40 or j % 8 == 0:
            short = label.removeprefix("rank ")
            drawn.append(
                f'<text x="{_LEFT + j * cell + cell / 2}" y="16" class="middle">{short}</text>'
            )
    return _svg(30 + len(labels) * height, "".join(drawn))


def _svg(height: float, content: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img">{content}</svg>'
