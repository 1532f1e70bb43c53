"""On which hosts, and with how many ranks each: from options, files and batch systems."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from keras_ring.errors import LaunchError


@dataclass(frozen=True)
class Host:
    """A host of a job.

    Args:
        name: Its name or address.
        slots: How many ranks it takes.
    """

    name: str
    slots: int


def parse_hosts(text: str) -> tuple[Host, ...]:
    """Read `"h1:2,h2:2"`; a host without a number takes one rank.

    Raises:
        LaunchError: A part is not a name and a number.
    """
    return _merged([_host(part.strip(), f"-H {text}") for part in text.split(",")])


def read_hostfile(path: Path) -> tuple[Host, ...]:
    """Read a file of one host a line: `h1`, `h1 slots=2` (Open MPI) or `h1:2` (MPICH).

    Empty lines and what follows a `#` do not count; a host listed several times takes the sum.

    Raises:
        LaunchError: The file cannot be read, or a line is not a host.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"--hostfile {path}: cannot be read: {error}") from error
    hosts = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        where = f"--hostfile {path}, line {number}"
        name, *settings = text.split()
        slots = [s.removeprefix("slots=") for s in settings if s.startswith("slots=")]
        hosts.append(_host(f"{name}:{slots[0]}" if slots else name, where))
    if not hosts:
        raise LaunchError(f"--hostfile {path}: names no host. Write one a line: h1 slots=2")
    return _merged(hosts)


def allocated_hosts(environment: Mapping[str, str]) -> tuple[Host, ...] | None:
    """Return what Slurm or PBS has given this job.

    Args:
        environment: The environment variables.

    Returns:
        The hosts, or None outside of a job.

    Raises:
        LaunchError: What the batch system says cannot be read.
    """
    if "SLURM_JOB_NODELIST" in environment:
        nodes = expand_nodelist(environment["SLURM_JOB_NODELIST"])
        given = environment.get("SLURM_TASKS_PER_NODE", "1")
        counts = _expand_counts(given)
        if len(counts) != len(nodes):
            raise LaunchError(
                f"Slurm: SLURM_TASKS_PER_NODE={given} is for {len(counts)} nodes, but "
                f"SLURM_JOB_NODELIST names {len(nodes)}. Give the hosts by -H."
            )
        return tuple(map(Host, nodes, counts))
    if "PBS_NODEFILE" in environment:
        path = Path(environment["PBS_NODEFILE"])
        try:
            names = path.read_text().split()
        except OSError as error:
            raise LaunchError(f"PBS: PBS_NODEFILE={path} cannot be read: {error}") from error
        return _merged([Host(name, 1) for name in names])
    return None


def expand_nodelist(text: str) -> list[str]:
    """Write out Slurm's short form: `"gpu[01-03,7],login"` is gpu01, gpu02, gpu03, gpu7, login.

    Raises:
        LaunchError: It is not of that form.
    """
    names: list[str] = []
    parts = re.findall(r"(?:[^,\[\]]|\[[^\]]*\])+", text)
    if ",".join(parts) != text:
        raise LaunchError(f"Slurm: SLURM_JOB_NODELIST={text!r} is not a list of nodes.")
    for part in parts:
        names += _expand_brackets(part, text)
    if not names:
        raise LaunchError(f"Slurm: SLURM_JOB_NODELIST={text!r} names no node. Give hosts by -H.")
    return names


def _expand_brackets(part: str, text: str) -> list[str]:
    match = re.fullmatch(r"([^\[\]]*)\[([^\]]*)\](.*)", part)
    if match is None:
        return [part]
    before, inside, after = match.groups()
    rests = _expand_brackets(after, text)
    numbers: list[str] = []
    for item in inside.split(","):
        ends = re.fullmatch(r"(\d+)(?:-(\d+))?", item)
        if ends is None:
            raise LaunchError(f"Slurm: SLURM_JOB_NODELIST={text!r}: {item!r} is not a range.")
        first, last = ends[1], ends[2] or ends[1]
        numbers += [str(n).zfill(len(first)) for n in range(int(first), int(last) + 1)]
    return [f"{before}{number}{rest}" for number in numbers for rest in rests]


def _expand_counts(text: str) -> list[int]:
    """Write out Slurm's numbers of tasks: `"2(x3),1"` is 2, 2, 2, 1."""
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item)
        if match is None:
            raise LaunchError(
                f"Slurm: SLURM_TASKS_PER_NODE={text!r}: {item!r} is not a number of tasks."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def _host(text: str, where: str) -> Host:
    # An address of IPv6 stands in brackets, as in [fe80::1]:2.
    match = re.fullmatch(r"(\[[0-9a-fA-F:.%\w]+\]|[\w.-]+)(?::(\d+))?", text)
    if match is None or match[2] == "0":
        raise LaunchError(
            f"{where}: {text!r} is not a host and a number of ranks of at least 1, such as h1:2."
        )
    return Host(match[1], int(match[2] or 1))


def _merged(hosts: Sequence[Host]) -> tuple[Host, ...]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return tuple(Host(name, count) for name, count in slots.items())
