"""Several hosts on one machine: network namespaces joined by a bridge, as root.

Ranks of different namespaces cannot share memory through MPI and see each other over TCP only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

BRIDGE = "krbr0"
NETWORK = "10.77.0"

# What mpirun calls in place of ssh: it names a host by its address, whose last number is that of
# the namespace, and gives the command after its own options.
_AGENT = """#!/bin/sh
while [ "${{1#-}}" != "$1" ]; do shift; done
host={prefix}${{1##*.}}
shift
exec ip netns exec "$host" unshare -u sh -c "hostname $host; $*"
"""


@dataclass(frozen=True)
class Hosts:
    """Namespaces that stand for hosts; the number at the end of a name ends the address, too."""

    names: tuple[str, ...]
    prefix: str

    @property
    def addresses(self) -> list[str]:
        return [f"{NETWORK}.{i + 1}" for i in range(len(self.names))]


def why_not() -> str:
    """Say why this process cannot make network namespaces; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the command ip (Debian: iproute2)"
    name = f"kr{os.getpid()}-probe"
    made = subprocess.run(["ip", "netns", "add", name], check=False, capture_output=True, text=True)
    subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
    return made.stderr.strip()


@contextlib.contextmanager
def hosts(num_hosts: int) -> Iterator[Hosts]:
    """Make the hosts, and take everything down at the end.

    The bridge lies in the first namespace, so that nothing of the machine's own network changes.
    """
    prefix = f"kr{os.getpid()}-"
    made = Hosts(tuple(f"{prefix}{i + 1}" for i in range(num_hosts)), prefix)
    first = made.names[0]
    try:
        for name in made.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", first, "link", "add", BRIDGE, "type", "bridge")
        _ip("-n", first, "link", "set", BRIDGE, "up")
        for i, (name, address) in enumerate(zip(made.names, made.addresses, strict=True)):
            _ip("-n", first, "link", "add", f"br{i}", "type", "veth", "peer", "name", "eth0",
                "netns", name)  # fmt: skip
            _ip("-n", first, "link", "set", f"br{i}", "master", BRIDGE, "up")
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield made
    finally:
        for name in made.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextlib.contextmanager
def launcher(made: Hosts, ranks: Sequence[int]) -> Iterator[tuple[list[str], list[str]]]:
    """Yield what goes before `mpirun`, and what goes after it, to start `ranks[i]` on host i."""
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "agent"
        agent.write_text(_AGENT.format(prefix=made.prefix))
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
        first = made.names[0]
        before = ["ip", "netns", "exec", first, "unshare", "-u", "sh", "-c",
                  f'hostname {first}; exec "$@"', "sh"]  # fmt: skip
        slots = ",".join(f"{a}:{n}" for a, n in zip(made.addresses, ranks, strict=True))
        after = ["--prtemca", "plm_ssh_agent", str(agent), "--host", slots,
                 "--mca", "btl_tcp_if_include", f"{NETWORK}.0/24",
                 "--prtemca", "oob_tcp_if_include", f"{NETWORK}.0/24"]  # fmt: skip
        yield before, after


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
