"""The command `keras-ring`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from keras_ring import __version__
from keras_ring.errors import KerasRingError
from keras_ring.launch import build


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `keras-ring`.

    Args:
        arguments: What follows the program's name. Defaults to None: `sys.argv[1:]`.

    Returns:
        The exit status: 0, or 1 after an error of keras_ring, which is printed to stderr.
    """
    options = _parser().parse_args(arguments)
    try:
        _build(options)
    except KerasRingError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-ring", description="Train Keras 3 models on many processes, over MPI."
    )
    parser.add_argument("--version", action="version", version=f"keras-ring {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    build_parser = commands.add_parser(
        "build",
        help="compile the C++ libraries again, after a change of MPI or TensorFlow",
        description="Compile the C++ libraries and put them into the installed package.",
    )
    build_parser.add_argument(
        "--mpicxx",
        metavar="PATH",
        help="the MPI C++ compiler wrapper; else KERAS_RING_MPICXX, then the mpicxx beside this "
        "Python, then the first on PATH",
    )
    build_parser.add_argument(
        "--build-dir",
        metavar="PATH",
        type=Path,
        help="keep object files here, so that the next build is faster; else a temporary folder",
    )
    return parser


def _build(options: argparse.Namespace) -> None:
    tools = build.find_tools(options.mpicxx)
    print(f"compiling {build.source_dir()} with {tools.mpi}", flush=True)
    for path in build.build(tools, build_dir=options.build_dir):
        print(f"installed {path}")
