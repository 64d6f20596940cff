"""TCP connections between the workers' hosts: made within seconds, or why not, and what to do."""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from pybackend.errors import ClusterError, PeerLostError
from pybackend.net.rendezvous import split_address
from pybackend.net.stream import Stream

# The system answers for a process that is busy: where nothing has answered by then, the network is
# at fault. Three lost packets are borne.
REACH_SECONDS = 10.0
# What a firewall that answers, a missing route or an absent host gives, beside silence.
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
    """A TCP connection from ``rank`` to ``other``, within `REACH_SECONDS` or ``patience``.

    Parameters
    ----------
    peers
        ``host:port`` per rank.

    Raises
    ------
    ClusterError
        Where the network does not let it through.
    PeerLostError
        Where the connection is refused.
    """
    host, port = split_address(peers[other])
    try:
        return Stream.connect((host, port), min(patience, REACH_SECONDS))
    except OSError as error:
        if isinstance(error, TimeoutError) or error.errno in _NETWORK_ERRORS:
            raise ClusterError(
                f"worker {rank} on {split_address(peers[rank])[0]} cannot reach worker {other} at "
                f"{peers[other]} ({error.strerror or error}). {network_advice()}"
            ) from error
        reason = f"cannot be reached at {peers[other]} ({error}: it has ended, or a firewall"
        raise PeerLostError(other, host, f"{reason} refuses the connection)") from error


def unreached(peers: Sequence[str], rank: int, others: Iterable[int]) -> str | None:
    """Try to connect to other hosts, at ports where nobody need listen.

    Returns
    -------
    str or None
        What is wrong, of the first that the network keeps away; a refusal is an answer.
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


def network_advice() -> str:
    """What to do where one host cannot reach another."""
    return (
        "A firewall or a missing route is between these two hosts, or the second one is down. "
        "Let all hosts that run workers connect to each other over TCP, at the ports from which "
        f"their systems pick{_ephemeral()}; `tfdist doctor --master ...` shows who reaches whom"
    )


def _ephemeral() -> str:
    """The range of ports for listening sockets that name none, on this host."""
    with contextlib.suppress(OSError, ValueError):
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
        return f" (net.ipv4.ip_local_port_range, here {low} to {high})"
    return ""
