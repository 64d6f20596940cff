"""TCP connections between the workers' hosts, with a short time limit and clear errors."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pybackend.core.errors import ClusterError, PeerLostError
from pybackend.core.net.rendezvous import split_address
from pybackend.core.net.stream import Stream

# The system answers even for a busy process: without an answer in this time, the network is the
# cause. Up to three packets may be lost.
REACH_SECONDS = 10.0
# Errors of a rejecting firewall, a missing route or a missing host.
_NETWORK_ERRORS = {
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EHOSTDOWN,
    errno.ETIMEDOUT,
    errno.EACCES,
    errno.EPERM,
}
_AT_ONCE = 64


def dial(peers: Sequence[str], rank: int, other: int, patience: float = REACH_SECONDS) -> Stream:
    """Connect ``rank`` to ``other`` within `REACH_SECONDS` or ``patience``, whichever is less.

    Parameters
    ----------
    peers
        ``host:port`` per rank.

    Raises
    ------
    ClusterError
        The network blocks the connection.
    PeerLostError
        The connection is refused.
    """
    host, port = split_address(peers[other])
    try:
        return Stream.connect((host, port), min(patience, REACH_SECONDS))
    except OSError as error:
        if isinstance(error, TimeoutError) or error.errno in _NETWORK_ERRORS:
            raise ClusterError(
                f"worker {rank} on {split_address(peers[rank])[0]} cannot reach worker {other} at "
                f"{peers[other]} ({error.strerror or error}). {advise_on_network()}"
            ) from error
        reason = f"cannot be reached at {peers[other]} ({error}: it has ended, or a firewall"
        raise PeerLostError(other, host, f"{reason} refuses the connection)") from error


def find_unreachable(peers: Sequence[str], rank: int, others: Iterable[int]) -> str | None:
    """Try to connect to other hosts, at ports where no process needs to listen.

    Returns
    -------
    str or None
        Message for the first unreachable host; a refused connection counts as reached.
    """

    def attempt(other: int) -> str | None:
        try:
            dial(peers, rank, other).close()
        except PeerLostError:
            pass
        except ClusterError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return next(filter(None, pool.map(attempt, others)), None)


def advise_on_network() -> str:
    """Return advice for a host that cannot reach another host."""
    return (
        "Either a firewall or a missing route separates these two hosts, or the second one is "
        "down. Allow all hosts that run workers to connect to each other over TCP, on the ports "
        f"that their systems pick from{_describe_ports()}; `tfdist doctor --master ...` shows "
        "which hosts can reach each other"
    )


def _describe_ports() -> str:
    """Describe this host's port range for sockets that do not choose a port."""
    with contextlib.suppress(OSError, ValueError):
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return f" (net.ipv4.ip_local_port_range, here {low} to {high})"
    return ""
