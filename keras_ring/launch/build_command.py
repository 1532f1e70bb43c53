"""The command `keras-ring build`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from keras_ring.launch import build


def add_to(commands: Any) -> None:
    """Add it to the commands of the command line, an object of argparse."""
    parser = commands.add_parser(
        "build",
        help="compile the C++ libraries again, after a change of MPI or TensorFlow",
        description="Compile the C++ libraries and put them into the installed package.",
    )
    parser.add_argument(
        "--mpicxx",
        metavar="PATH",
        help="the MPI C++ compiler wrapper; else KERAS_RING_MPICXX, then the mpicxx beside this "
        "Python, then the first on PATH",
    )
    parser.add_argument(
        "--build-dir",
        metavar="PATH",
        type=Path,
        help="keep object files here, so that the next build is faster; else a temporary folder",
    )
    parser.set_defaults(execute=_execute)


def _execute(options: argparse.Namespace) -> int:
    tools = build.find_tools(options.mpicxx)
    print(f"compiling {build.source_dir()} with {tools.mpi}", flush=True)
    for path in build.build(tools, build_dir=options.build_dir):
        print(f"installed {path}")
    return 0
