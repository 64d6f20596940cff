"""Cost of protecting an all-reduce between two processes over sockets: plain, with a MAC, with TLS.

CPU time is what matters: on a network, wall time passes while bytes are in transit. The MAC is the
cheapest possible one: BLAKE2b of all bytes sent and received, without frames.
"""

from __future__ import annotations

import hashlib
import json
import socket
import sys
import time

import numpy as np
from collective import run_ranks

from pybackend.core.collective import Mesh, join_mesh
from pybackend.core.net.stream import Stream

CASES = {"plain": False, "BLAKE2b of the same bytes": False, "TLS 1.3": True}
SIZES = {"1KB": (1024, 300), "1MB": (1 << 20, 30), "100MB": (100_000_000, 3)}
"""By column: bytes of a float32 buffer, and the number of sums in a round."""


class HashedStream(Stream):
    """Stream that hashes all bytes with a key, without sending the hash."""

    def send_some(self, buffers: list[memoryview]) -> int:
        """Send, then hash the sent bytes."""
        return _hash(buffers, super().send_some(buffers))

    def receive_some(self, buffers: list[memoryview]) -> int:
        """Receive, then hash the received bytes."""
        return _hash(buffers, super().receive_some(buffers))


def _hash(buffers: list[memoryview], count: int) -> int:
    rest = count
    if count:
        digest = hashlib.blake2b(key=bytes(32), digest_size=16)
        for buffer in buffers:
            digest.update(buffer[:rest])
            rest = max(0, rest - len(buffer))
        digest.digest()
    return count


def measure(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Medians over interleaved rounds and both processes."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    for _ in range(rounds):
        for name in CASES:
            found[name] += run_ranks(__file__, [name])
    table = {
        name: {column: float(np.median([f[column] for f in figures])) for column in figures[0]}
        for name, figures in found.items()
    }
    return {"all-reduce between 2 processes on one machine, by protection": table}


def _member(name: str, rank: int, server: socket.socket, token: str, peers: list[str]) -> None:
    encrypt = CASES[name]
    mesh = join_mesh(server, peers, rank, token, 60, encrypt=encrypt, shares_memory=False)
    if name.startswith("BLAKE2b"):
        for link in mesh.links.values():
            link.stream.__class__ = HashedStream
    print(json.dumps({k: v for size in SIZES for k, v in _time(mesh, size).items()}))


def _time(mesh: Mesh, column: str) -> dict[str, float]:
    """Return milliseconds of one sum: wall time and CPU time."""
    nbytes, times = SIZES[column]
    buffer = np.zeros(nbytes // 4, np.float32)
    mesh.all_reduce(buffer)
    began, busy = time.perf_counter(), time.process_time()
    for _ in range(times):
        mesh.all_reduce(buffer)
    ended, worked = time.perf_counter(), time.process_time()
    return {
        f"ms_{column}": (ended - began) / times * 1e3,
        f"cpu_ms_{column}": (worked - busy) / times * 1e3,
    }


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _, case, number, descriptor, secret, *addresses = sys.argv
        _member(case, int(number), socket.socket(fileno=int(descriptor)), secret, addresses)
    else:
        print(json.dumps(measure(3), indent=2))
