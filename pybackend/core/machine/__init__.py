"""This machine: its names and addresses here; cores, memory, GPUs and processes in the modules.

Nothing else in the package reads ``/proc`` or ``/sys`` for these.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import zlib
from pathlib import Path

_LOOPBACK = ("localhost", "ip6-localhost", "ip6-loopback")


def read_boot() -> str:
    """Return what is the same in all processes of a machine until it restarts; empty if unknown.
    Containers on one machine share it.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:  # not Linux
        return ""


def number_machine() -> int:
    """Return a number below 2**32 that is the same in all processes of a machine."""
    return zlib.crc32(read_boot().encode())


def is_loopback(host: str) -> bool:
    """Return whether a host name or address always refers to the machine itself."""
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return host in _LOOPBACK


def resolve(host: str) -> list[str]:
    """Return the addresses of a host; empty if this machine cannot resolve its name."""
    try:
        return look_up(host)
    except OSError:
        return []


def look_up(host: str) -> list[str]:
    """Return the addresses of a host; raise `OSError` if this machine cannot resolve its name."""
    return [str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


def own_address(peer: str) -> str | None:
    """Return this machine's address on the route to a host, or None; nothing is sent."""
    try:
        # Any port works: connecting a datagram socket only looks up the route.
        infos = socket.getaddrinfo(peer.strip("[]"), 9, type=socket.SOCK_DGRAM)
        family, _, _, _, address = infos[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            return str(probe.getsockname()[0])
    except OSError:
        return None


def reached_address() -> str | None:
    """Return the address of this machine that ssh used, which others can use as well, or None."""
    # Addresses and ports of both ends.
    words = os.environ.get("SSH_CONNECTION", "").split()
    return words[2] if len(words) == 4 else None


def is_own_address(address: str) -> bool:
    """Return whether this is an address at which others can reach this machine."""
    known = ipaddress.ip_address(address.partition("%")[0])
    if known.is_loopback or known.is_link_local:
        return False
    family = socket.AF_INET6 if known.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
