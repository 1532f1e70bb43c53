"""The network interfaces of this host, and which of them leads to another."""

from __future__ import annotations

import fcntl
import socket
import struct

from keras_ring.errors import LaunchError

_GET_ADDRESS = 0x8915  # SIOCGIFADDR of linux/sockios.h


def addresses() -> dict[str, str | None]:
    """Return the IPv4 address of each interface by its name; None where it has none."""
    found: dict[str, str | None] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe, _GET_ADDRESS, request)
            except OSError:
                found[name] = None
            else:
                found[name] = socket.inet_ntoa(answer[20:24])
    return found


def address_towards(host: str | None, interface: str | None) -> str:
    """Return the address of this host under which another one reaches it.

    Args:
        host: The other; None if all ranks are on this one.
        interface: The network interface to use, or its address. Defaults to what leads there.

    Raises:
        LaunchError: There is no way to the host, or no such interface.
    """
    if host is None:
        return "127.0.0.1"
    if interface is not None:
        return _named(interface)
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            # Sends nothing: it only asks which way packets would go.
            probe.connect((host, 9))
            return str(probe.getsockname()[0])
    except OSError as error:
        raise LaunchError(
            f"host {host}: {error}. Check its name, or choose the way by --network-interface."
        ) from error


def _named(interface: str) -> str:
    known = addresses()
    address = known.get(interface)
    if address is None:
        listed = ", ".join(f"{name} ({known[name] or 'no address'})" for name in known)
        raise LaunchError(
            f"--network-interface {interface}: no interface of this host with an IPv4 address; it "
            f"has {listed}"
        )
    return address
