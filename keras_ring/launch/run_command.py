"""The command `keras-ring run`."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

from keras_ring.errors import LaunchError
from keras_ring.launch.job import Job, Options


def add_to(commands: Any) -> None:
    """Add it to the commands of the command line, an object of argparse."""
    parser = commands.add_parser(
        "run",
        help="start a program on several ranks",
        usage="keras-ring run [-np N] [-H HOSTS | --hostfile FILE] ... PROGRAM [ARGUMENT ...]",
        description="Start a program on several ranks by mpirun, and watch over them: the first "
        "failure ends all, and its traceback and exit status are the job's. Within a job of Slurm "
        "or PBS, hosts and ranks are those that it was given.",
    )
    parser.add_argument("-np", "-n", dest="num_ranks", metavar="N", type=int, help="how many ranks")
    parser.add_argument(
        "-H", "--hosts", metavar="HOSTS", help="hosts and how many ranks each takes: h1:2,h2:2"
    )
    parser.add_argument(
        "--hostfile", metavar="FILE", type=Path, help="a file of one host a line: h1 slots=2"
    )
    parser.add_argument(
        "--network-interface",
        metavar="NAME",
        help="the network interface for all traffic, such as eth1",
    )
    parser.add_argument(
        "--prefix-output",
        action="store_true",
        help="begin each line of output with [rank]",
    )
    parser.add_argument(
        "-x",
        dest="forwarded",
        metavar="NAME",
        action="append",
        default=[],
        help="also hand this environment variable to other hosts; NAME may be a pattern such as "
        "MY_*, or NAME=VALUE. TF_*, KERAS_*, PYTHON*, OMP_*, XLA_* and PATH are handed on anyway",
    )
    parser.add_argument(
        "--mpirun-args",
        metavar="TEXT",
        default="",
        help="what mpirun gets besides, in one argument, such as '--mca btl ^ofi'",
    )
    parser.add_argument("program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    parser.set_defaults(execute=_execute)


def _execute(options: argparse.Namespace) -> int:
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if not program:
        raise LaunchError(
            "keras-ring run: which program? Such as keras-ring run -np 2 python train.py"
        )
    given = dict(item.split("=", 1) for item in options.forwarded if "=" in item)
    job = Job(
        program,
        Options(
            num_ranks=options.num_ranks,
            hosts=options.hosts,
            hostfile=options.hostfile,
            network_interface=options.network_interface,
            prefix_output=options.prefix_output,
            environment=given,
            mpirun_arguments=shlex.split(options.mpirun_args),
            forwarded=[item for item in options.forwarded if "=" not in item],
        ),
    )
    status = job.run()
    if job.first_failure is not None and not job.was_interrupted:
        print(f"\nkeras-ring run: {job.first_failure}", file=sys.stderr, flush=True)
    return status
