"""The command `keras-ring`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from keras_ring import __version__
from keras_ring.errors import KerasRingError
from keras_ring.launch import build_command, check_command, run_command, timeline_commands


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `keras-ring`.

    Args:
        arguments: What follows the program's name. Defaults to None: `sys.argv[1:]`.

    Returns:
        The exit status: that of the command, or 1 after an error of keras_ring, which is printed
        to stderr.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.execute(options))
    except KerasRingError as error:
        print(error, file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="keras-ring", description="Train Keras 3 models on many processes, over MPI."
    )
    parser.add_argument("--version", action="version", version=f"keras-ring {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in (run_command, check_command, timeline_commands, build_command):
        command.add_to(commands)
    return parser
