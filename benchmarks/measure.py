"""Start the ranks of one peer, in one configuration, and take the times of all its work."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

WORKERS = Path(__file__).parent / "workers.py"
LIMIT_S = 900

# What is done: the name of a row to a function of workers.py and its arguments.
Works = Mapping[str, tuple[str, Mapping[str, Any]]]


@dataclasses.dataclass(frozen=True)
class Peer:
    """A library in one of the configurations that its users are told to try."""

    label: str
    library: str  # as workers.py calls it
    python: str = sys.executable
    mpirun_arguments: tuple[str, ...] = ()
    before: tuple[str, ...] = ()  # of mpirun itself
    environment: Mapping[str, str] = dataclasses.field(default_factory=dict)
    works: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # arguments of every work


YIELD = ("--mca", "mpi_yield_when_idle", "1")


def keras_ring_peer() -> Peer:
    """The library that is measured: as shipped, there is nothing to tune."""
    return Peer("keras_ring", "keras_ring")


def mpi_peers() -> list[Peer]:
    """MPI's own collectives, through mpi4py."""
    return [
        Peer("mpi as shipped", "mpi"),
        Peer("mpi yield when idle", "mpi", mpirun_arguments=YIELD),
    ]


def horovod_peers(python: str | None) -> list[Peer]:
    """Horovod in the environment of `python`; nothing without one."""
    if python is None:
        return []
    tuned = {"HOROVOD_CYCLE_TIME": "0.1"}
    return [
        Peer("horovod as shipped", "horovod", python),
        Peer("horovod yield when idle", "horovod", python, YIELD),
        Peer("horovod short cycle", "horovod", python, YIELD, environment=tuned),
    ]


def measure(peer: Peer, num_ranks: int, works: Works) -> dict[str, float]:
    """Return the seconds that rank 0 reports for each work; those that failed are left out."""
    given = {name: (kind, {**values, **peer.works}) for name, (kind, values) in works.items()}
    command = [
        *peer.before, str(Path(peer.python).parent / "mpirun"), "-np", str(num_ranks),
        "--oversubscribe", "--bind-to", "none", *peer.mpirun_arguments,
        peer.python, str(WORKERS), peer.library, json.dumps(given),
    ]  # fmt: skip
    environment = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **peer.environment,
    }
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        output, errors = done.stdout, done.stderr
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode(errors="replace")
        errors = f"no end within {LIMIT_S} s"
    seconds = {}
    for line in output.splitlines():
        if line.startswith("BENCH "):
            seconds |= json.loads(line.removeprefix("BENCH "))
    if missing := [name for name in works if name not in seconds]:
        print(
            f"{peer.label}, {num_ranks} ranks, failed: {missing}\n{errors[-2000:]}", file=sys.stderr
        )
    return seconds
