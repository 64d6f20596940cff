"""Rank and address of a process among processes that users start themselves."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from pybackend.net.rendezvous import split_address

# Below the ports for outgoing connections, from 32768 on, and above those of most services.
_FIRST_PORT, _PORTS = 20_000, 12_000


@dataclass(frozen=True)
class Place:
    """Rank of a process, and the addresses by which processes connect.

    Attributes
    ----------
    rank, size
        Its rank, from 0, and the number of processes.
    meeting
        ``host:port`` on which the first process listens, and to which the others connect.
    own
        ``host:port`` on which this process listens; None: the system chooses the port.
    source
        Source of these values, for messages: ``"TF_CONFIG"``, ``"srun"``, ``"mpirun"``.
    peers
        Hosts or addresses of all processes, by rank, for messages; empty if unknown.
    local_rank, local_size
        Its rank among the processes on its machine, and their number.
    """

    rank: int
    size: int
    meeting: str
    own: str | None
    source: str
    peers: tuple[str, ...] = ()
    local_rank: int = 0
    local_size: int = 1

    @property
    def is_one_machine(self) -> bool:
        """True if all processes connect over the loopback interface."""
        return all(is_loopback(split_host(peer)) for peer in {self.meeting, *self.peers})

    def name(self, rank: int) -> str:
        """Return the name of a process for messages."""
        where = f" ({self.peers[rank]})" if self.peers else ""
        return f"worker {rank}{where}"


def pick_port(number: int) -> int:
    """Return the port for a group with this number, the same in all its processes."""
    return _FIRST_PORT + number % _PORTS


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_host(address: str) -> str:
    """Return the host of ``host:port``, or of a host alone."""
    return split_address(address)[0] if ":" in address else address
