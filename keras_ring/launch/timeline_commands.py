"""The commands `keras-ring timeline merge` and `keras-ring report`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from keras_ring.launch.timeline import clock, files, measures, merge, page

REPORT = "report.html"


def add_to(commands: Any) -> None:
    """Add them to the commands of the command line, an object of argparse."""
    timeline = commands.add_parser("timeline", help="work with timelines that ranks have written")
    actions = timeline.add_subparsers(title="actions", required=True, metavar="ACTION")
    merging = actions.add_parser(
        "merge",
        help="make one trace of all ranks, on one clock",
        description="Make one trace of all ranks' timelines, on one clock. ui.perfetto.dev opens "
        "it. The ranks may still be running, or have crashed.",
    )
    merging.set_defaults(execute=_merge)
    reporting = commands.add_parser(
        "report",
        help="make a page that shows what ranks waited for",
        description="Make one page of HTML from all ranks' timelines: the time of a step, who "
        "waited for whom, bytes, and how much of the transfers lay beside computation.",
    )
    reporting.set_defaults(execute=_report)
    for parser, default in ((merging, merge.MERGED), (reporting, REPORT)):
        parser.add_argument("folder", type=Path, help="the folder of KERAS_RING_TIMELINE")
        parser.add_argument(
            "-o", "--output", type=Path, metavar="FILE", help=f"defaults to {default} in the folder"
        )


def _merge(options: argparse.Namespace) -> int:
    timelines = files.read_folder(options.folder)
    output = options.output or options.folder / merge.MERGED
    for sentence in merge.describe(merge.merge(timelines, output)):
        print(sentence)
    print(f"{output}: {len(timelines)} timelines. Open it at https://ui.perfetto.dev")
    return 0


def _report(options: argparse.Namespace) -> int:
    timelines = files.largest_group(files.read_folder(options.folder))
    clocks = clock.offsets(timelines)
    measured = measures.measure(timelines, clocks)
    output = options.output or options.folder / REPORT
    output.write_text(page.render(measured, merge.describe(clocks)))
    for sentence in page.sentences(measured):
        print(sentence)
    print(f"{output}: open it in a browser")
    return 0
