"""The command `keras-ring check`: what a report of a bug needs, and whether two ranks work."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from keras_ring import __version__
from keras_ring.errors import KerasRingError
from keras_ring.launch import build, command, hosts, interfaces
from keras_ring.launch.environment import current
from keras_ring.launch.function import run

_PACKAGES = ("tensorflow", "tensorflow-cpu", "keras", "mpi4py", "numpy", "h5py")
_GIB = 1 << 30
# The arena's default limit is 64 MiB a rank.
_ENOUGH_SHM_BYTES = 64 << 20


def add_to(commands: Any) -> None:
    """Add it to the commands of the command line, an object of argparse."""
    parser = commands.add_parser(
        "check",
        help="show what is installed, and let two ranks add numbers",
        description="Show versions, libraries, hosts and interfaces, and run a self-test on this "
        "host. The exit status is 0 only if the ranks computed what they should. Put the output "
        "into a report of a bug.",
    )
    parser.add_argument(
        "-np", "-n", dest="num_ranks", metavar="N", type=int, default=2, help="ranks of the test"
    )
    parser.set_defaults(execute=_execute)


def _execute(options: argparse.Namespace) -> int:
    for title, describe in (
        ("versions", _versions),
        ("build", _build),
        ("this host", _host),
        ("batch system", _allocation),
    ):
        print(f"{title}:")
        for name, value in describe().items():
            print(f"  {name:20} {value}")
        sys.stdout.flush()
    print(f"self-test on {options.num_ranks} ranks:", flush=True)
    try:
        ranks = run(_self_test, np=options.num_ranks, hosts=f"localhost:{options.num_ranks}")
    except KerasRingError as error:
        print(f"  FAILED: {error}", flush=True)
        return 1
    for name, value in ranks[0].items():
        print(f"  {name:20} {value}")
    print("all ranks computed the right sums")
    return 0


def _self_test() -> dict[str, str]:
    """Run on each rank; by name, because what is loaded there is not of the launcher."""
    test: dict[str, str] = importlib.import_module("keras_ring.self_test").run()
    return test


def _versions() -> dict[str, str]:
    found = {"keras_ring": __version__, "Python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            if name != "tensorflow-cpu":
                found[name] = "not installed"
    found["mpirun"] = _or_error(command.find_launcher)
    return found


def _build() -> dict[str, str]:
    found = {"C++ wrapper of MPI": _or_error(build.find_mpi)}
    try:
        mpicxx = build.find_mpi().mpicxx
        done = subprocess.run(
            [mpicxx, "--version"], capture_output=True, text=True, timeout=20, check=True
        )
        found["compiler"] = done.stdout.partition("\n")[0]
    except (KerasRingError, OSError, subprocess.SubprocessError) as error:
        found["compiler"] = f"{error}"
    for name in build.LIBRARIES:
        path = build.library_dir() / name
        size = f"{path.stat().st_size / 2**20:.1f} MiB" if path.is_file() else "MISSING"
        found[name] = f"{size} in {path.parent}"
    return found


def _host() -> dict[str, str]:
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    found = {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": f"{cores} of {os.cpu_count()} for this process",
        "memory": f"{memory / _GIB:.1f} GiB",
        "shared memory": _shared_memory(),
    }
    for name, address in interfaces.addresses().items():
        found[f"interface {name}"] = address or "no IPv4 address"
    return found


def _shared_memory() -> str:
    try:
        system = os.statvfs("/dev/shm")
    except OSError as error:
        return f"none: {error}; ranks of a host exchange by MPI, which is slower"
    size, free = system.f_frsize * system.f_blocks, system.f_frsize * system.f_bavail
    text = f"/dev/shm of {size / _GIB:.2f} GiB, {free / _GIB:.2f} GiB free"
    if free < _ENOUGH_SHM_BYTES:
        text += "; TOO SMALL: in a container, --shm-size=1g"
    return text


def _allocation() -> dict[str, str]:
    try:
        given = hosts.allocated_hosts(current())
    except KerasRingError as error:
        return {"hosts": f"{error}"}
    if given is None:
        return {"hosts": "none: not in a job of Slurm or PBS"}
    return {"hosts": ", ".join(f"{host.name}:{host.slots}" for host in given)}


def _or_error(find: Callable[[], Any]) -> str:
    try:
        return str(find())
    except KerasRingError as error:
        return f"{error}"
