"""Three hosts on one machine: network namespaces joined by a bridge, as root.

Ranks of different namespaces cannot share memory through MPI and see each other over TCP only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

BRIDGE = "krbr0"
NETWORK = "10.77.0"

# What mpirun calls in place of ssh: it names a host by its address, whose last number is that of
# the namespace, and gives the command after its own options.
_AGENT = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
host=kr${1##*.}
shift
exec ip netns exec "$host" unshare -u sh -c "hostname $host; $*"
"""


def can_imitate() -> bool:
    """Whether this process may make network namespaces."""
    return os.geteuid() == 0 and shutil.which("ip") is not None


@contextlib.contextmanager
def hosts(num_hosts: int) -> Iterator[list[str]]:
    """Make the hosts; yields their addresses, and takes everything down at the end.

    The bridge lies in the first namespace, so that nothing of the machine's own network changes.
    """
    names = [f"kr{i + 1}" for i in range(num_hosts)]
    try:
        for name in names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        _ip("-n", names[0], "link", "add", BRIDGE, "type", "bridge")
        _ip("-n", names[0], "link", "set", BRIDGE, "up")
        for i, name in enumerate(names):
            _ip("-n", names[0], "link", "add", f"br{i}", "type", "veth", "peer", "name", "eth0",
                "netns", name)  # fmt: skip
            _ip("-n", names[0], "link", "set", f"br{i}", "master", BRIDGE, "up")
            _ip("-n", name, "addr", "add", f"{NETWORK}.{i + 1}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
        yield [f"{NETWORK}.{i + 1}" for i in range(num_hosts)]
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


@contextlib.contextmanager
def launcher(addresses: list[str], ranks_per_host: int) -> Iterator[tuple[list[str], list[str]]]:
    """Yield what goes before `mpirun`, and what goes after it, to start on the hosts."""
    with tempfile.TemporaryDirectory() as folder:
        agent = Path(folder) / "agent"
        agent.write_text(_AGENT)
        agent.chmod(agent.stat().st_mode | stat.S_IXUSR)
        before = ["ip", "netns", "exec", "kr1", "unshare", "-u", "sh", "-c",
                  'hostname kr1; exec "$@"', "sh"]  # fmt: skip
        slots = ",".join(f"{address}:{ranks_per_host}" for address in addresses)
        after = ["--prtemca", "plm_ssh_agent", str(agent), "--host", slots,
                 "--mca", "btl_tcp_if_include", f"{NETWORK}.0/24",
                 "--prtemca", "oob_tcp_if_include", f"{NETWORK}.0/24"]  # fmt: skip
        yield before, after


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
