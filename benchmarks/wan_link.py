"""Slow link between two network namespaces, run by this process: delay, rate, a short queue.

``python wan_link.py NAMESPACE_A ADDRESS_A NAMESPACE_B ADDRESS_B DELAY_MS MBIT`` prints ``up``, and
carries packets between two TUN devices until it is stopped. It also works in kernels without netem.
"""

from __future__ import annotations

import collections
import ctypes
import fcntl
import os
import select
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import NoReturn

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_DEVICE = "wan0"
# Queue of a router before it drops packets.
_QUEUE_SECONDS = 0.2
_BURST = 256


class Direction:
    """One direction of the link: packets leave at its rate, and arrive after its delay."""

    def __init__(self, out: int, delay: float, bytes_per_second: float) -> None:
        self._out = out
        self._delay = delay
        self._rate = bytes_per_second
        self._waiting: collections.deque[tuple[float, bytes]] = collections.deque()
        self._free = 0.0

    @property
    def next_arrival(self) -> float | None:
        """Return the time at which the next packet arrives."""
        return self._waiting[0][0] if self._waiting else None

    def send(self, packet: bytes) -> None:
        """Put a packet on the link, or drop it if the queue is full."""
        now = time.monotonic()
        begins = max(self._free, now)
        if begins - now > _QUEUE_SECONDS:
            return
        self._free = begins + len(packet) / self._rate
        self._waiting.append((self._free + self._delay, packet))

    def deliver(self) -> None:
        """Deliver the packets that have arrived."""
        now = time.monotonic()
        while self._waiting and self._waiting[0][0] <= now:
            os.write(self._out, self._waiting.popleft()[1])


def open_end(namespace: str, own: str, other: str) -> int:
    """Create a TUN device in a namespace; return its descriptor, which works in any namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    home = os.open("/proc/self/ns/net", os.O_RDONLY)
    inside = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    if libc.setns(inside, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    end = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(end, _TUNSETIFF, struct.pack("16sH", _DEVICE.encode(), _IFF_TUN | _IFF_NO_PI))
    for command in (
        ["address", "add", own, "peer", other, "dev", _DEVICE],
        ["link", "set", _DEVICE, "up", "mtu", "1500", "txqueuelen", "2000"],
    ):
        subprocess.run(["ip", *command], check=True)
    libc.setns(home, _CLONE_NEWNET)
    return end


def main(arguments: list[str]) -> None:
    """Carry packets until this process is stopped."""
    first, first_address, second, second_address, delay_ms, mbit = arguments
    ends = (
        open_end(first, first_address, second_address),
        open_end(second, second_address, first_address),
    )
    speed = float(delay_ms) / 1e3, float(mbit) * 1e6 / 8
    carry({ends[0]: Direction(ends[1], *speed), ends[1]: Direction(ends[0], *speed)})


def carry(ways: Mapping[int, Direction]) -> NoReturn:
    """Carry packets from each device in its direction, until this process is stopped."""
    poller = select.poll()
    for end in ways:
        poller.register(end, select.POLLIN)
    print("up", flush=True)
    while True:
        arrivals = [way.next_arrival for way in ways.values() if way.next_arrival is not None]
        pause = min(arrivals, default=time.monotonic() + 1) - time.monotonic()
        for end, _ in poller.poll(max(0, 1e3 * pause)):
            for _ in range(_BURST):
                try:
                    ways[end].send(os.read(end, 65536))
                except BlockingIOError:
                    break
        for way in ways.values():
            way.deliver()


if __name__ == "__main__":
    main(sys.argv[1:])
