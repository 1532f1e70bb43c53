"""The results of a benchmark as a table, as JSON and as a picture."""

from __future__ import annotations

import json
from pathlib import Path

Row = dict[str, float | None]


def text_of(seconds: float | None) -> str:
    """Seconds in the unit that a person reads best."""
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} us"
    return f"{seconds * 1e3:.2f} ms" if seconds < 0.1 else f"{seconds * 1e3:.0f} ms"


def progress(name: str, row: Row) -> None:
    """Print one row as soon as it is known."""
    print(f"{name}: " + ", ".join(f"{who} {text_of(s)}" for who, s in row.items()), flush=True)


def ratios(row: Row) -> Row:
    """How many times faster keras_ring is than each peer; of `alone`, the efficiency."""
    own = row.get("keras_ring")
    if not own:
        return {}
    return {who: s / own for who, s in row.items() if who != "keras_ring" and s is not None}


def table(rows: dict[str, Row]) -> str:
    """One line for each work: keras_ring's time, and each peer's as a multiple of it."""
    lines = ["| work | keras_ring | peers, as a multiple of keras_ring's time |", "|---|---|---|"]
    for name, row in rows.items():
        peers = "; ".join(
            f"{who} {ratio:.2f} ({text_of(row[who])})" for who, ratio in ratios(row).items()
        )
        lines.append(f"| {name} | {text_of(row.get('keras_ring'))} | {peers} |")
    return "\n".join(lines)


def write(folder: Path, machine: str, rows: dict[str, Row]) -> None:
    """Print the table and write it, the figures and the picture into `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    print(f"\n{machine}\n\n{table(rows)}")
    result = {
        "machine": machine,
        "seconds": rows,
        "ratios": {n: ratios(r) for n, r in rows.items()},
    }
    (folder / "results.json").write_text(json.dumps(result, indent=2) + "\n")
    (folder / "results.md").write_text(f"{machine}\n\n{table(rows)}\n")
    draw(folder / "results.png", machine, rows)
    print(f"\nwritten to {folder}/results.json, results.md and results.png")


def draw(path: Path, machine: str, rows: dict[str, Row]) -> None:
    """Draw each peer's time as a multiple of keras_ring's, which is the line at 1."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bars = [(n, who, r) for n, row in rows.items() for who, r in ratios(row).items()]
    if not bars:
        return
    kinds = sorted({who.split()[0] for _, who, _ in bars})
    colours = {kind: f"C{i}" for i, kind in enumerate(kinds)}
    figure, axes = pyplot.subplots(figsize=(9, 0.24 * len(bars) + 1.5))
    places = range(len(bars), 0, -1)
    axes.barh(places, [r for *_, r in bars], color=[colours[w.split()[0]] for _, w, _ in bars])
    axes.set_yticks(places, [f"{name}: {who}" for name, who, _ in bars], fontsize=7)
    for place, (*_, ratio) in zip(places, bars, strict=True):
        axes.text(ratio, place, f" {ratio:.2f}", va="center", fontsize=7)
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_xlabel("time as a multiple of keras_ring's (right of the line: slower)")
    axes.set_title(machine, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
