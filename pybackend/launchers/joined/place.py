"""A process's place in a gang of processes that were started beside each other."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from pybackend.net.rendezvous import split_address

# Below the ports that systems give to outgoing connections, from 32768 on, and above those of most
# services.
_FIRST_PORT, _PORTS = 20_000, 12_000


@dataclass(frozen=True)
class Place:
    """Which process this is, and where the others find it.

    Attributes
    ----------
    rank, size
        Its number, from 0, and how many there are.
    meeting
        ``host:port`` at which the first process listens, and all find each other.
    own
        ``host:port`` at which this one accepts the others; None: the system picks the port.
    source
        What has said so, for messages: ``"TF_CONFIG"``, ``"srun"``, ``"mpirun"``.
    peers
        Hosts or addresses of all, by rank, for messages; empty if they are not known.
    local_rank, local_size
        Its number among those on its machine, and how many of them share the machine.
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
        """Whether all processes meet on the loopback interface."""
        return all(is_loopback(split_host(peer)) for peer in {self.meeting, *self.peers})

    def name(self, rank: int) -> str:
        """A process as messages call it."""
        where = f" ({self.peers[rank]})" if self.peers else ""
        return f"worker {rank}{where}"


def pick_port(number: int) -> int:
    """The port for a gang of this number, the same in all its processes."""
    return _FIRST_PORT + number % _PORTS


def is_loopback(host: str) -> bool:
    """Whether a host's name or address is this machine's own, and no other machine's."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def split_host(address: str) -> str:
    """The host of ``host:port``, or of a host alone."""
    return split_address(address)[0] if ":" in address else address
