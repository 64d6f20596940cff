"""What one worker sees of its cluster: its own machine, and which other workers it reaches.

`inspect_worker` runs on the workers, so this module imports neither TensorFlow nor numpy.

A connection is accepted and closed, and so is it on the other side: nothing is read from it and
nothing is served on it, so it needs no proof that it comes from this job.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from pybackend.doctor.machine import inspect_machine
from pybackend.job.context import WorkerContext
from pybackend.tf_config import parse_address

ATTEMPT_SECONDS = 3.0
# All workers begin within seconds of each other; those that begin last find the others listening.
PATIENCE_SECONDS = 15.0
TIMED_OUT = f"timed out after {ATTEMPT_SECONDS:g} s"
REFUSED = "refused"
_AT_ONCE = 64
_RETRY_SECONDS = 0.1
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def inspect_worker(context: WorkerContext) -> dict[str, Any]:
    """The function that `barrier_run` runs on every worker; returns plain data.

    Returns
    -------
    dict
        `inspect_machine`, and ``rank``, ``address``, ``host``, ``hostname``, ``ports`` (first
        and last that the system picks from, or None) and what `try_peers` returns.
    """
    address = context.addresses[context.rank]
    return {
        "rank": context.rank,
        "address": address,
        "host": parse_address(address)[0],
        "hostname": socket.gethostname(),
        "ports": _port_range(),
        **try_peers(context.addresses, context.rank),
        **inspect_machine(),
    }


def inspect_host() -> dict[str, Any]:
    """What a host has, for hosts whose workers cannot meet: `inspect_machine` and ``hostname``."""
    return {"host": None, "hostname": socket.gethostname(), **inspect_machine()}


def try_peers(
    addresses: Sequence[str], rank: int, patience: float = PATIENCE_SECONDS
) -> dict[str, Any]:
    """Connect to all other workers while they connect to this one.

    Parameters
    ----------
    addresses
        ``host:port`` by rank. This worker's own port may be held by its launcher, bound with
        SO_REUSEADDR and not listening.
    patience
        Seconds until a connection that is refused is a result, and for which this worker listens
        if not all others have come. It all ends within `ATTEMPT_SECONDS` after them.

    Returns
    -------
    dict
        ``unreached``: a dict of ``rank`` and ``reason`` for each that was not reached, and
        ``listen_error``: why this worker itself could not listen, or None.
    """
    return asyncio.run(_try_peers(addresses, rank, time.monotonic() + patience))


async def _try_peers(addresses: Sequence[str], rank: int, deadline: float) -> dict[str, Any]:
    # Each begins with its neighbour: rank 0 is not called by all at once.
    others = [(rank + step) % len(addresses) for step in range(1, len(addresses))]
    crowd = asyncio.Semaphore(_AT_ONCE)
    with ExitStack() as stack:
        listen_error, visits = None, None
        try:
            server = stack.enter_context(_listening(addresses[rank]))
            visits = asyncio.ensure_future(_welcome(server, len(others)))
        except OSError as error:
            listen_error = _describe(error)
        reasons = await asyncio.gather(
            *(_find_reason(addresses[o], deadline, crowd) for o in others)
        )
        if visits is not None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(visits, max(0.0, deadline - time.monotonic()))
    unreached = [
        {"rank": other, "reason": reason}
        for other, reason in sorted(zip(others, reasons, strict=True))
        if reason is not None
    ]
    return {"unreached": unreached, "listen_error": listen_error}


def _listening(address: str) -> socket.socket:
    with ExitStack() as stack:
        server, place = _socket_for(address)
        stack.enter_context(server)
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(place)
        server.listen(1024)
        stack.pop_all()
    return server


async def _welcome(server: socket.socket, expected: int) -> None:
    """Accept each of the other workers once; then they need this one no longer."""
    for _ in range(expected):
        connection, _ = await asyncio.get_running_loop().sock_accept(server)
        connection.close()


async def _find_reason(address: str, deadline: float, crowd: asyncio.Semaphore) -> str | None:
    """Why an address was not reached; None if it was."""
    reason: str | None = "not tried in time"  # if hundreds time out, the last have no turn
    while time.monotonic() < deadline:
        async with crowd:
            reason = await _attempt(address)
        if reason != REFUSED:
            break
        await asyncio.sleep(_RETRY_SECONDS)  # it may not listen yet
    return reason


async def _attempt(address: str) -> str | None:
    connection, place = _socket_for(address)
    with connection:
        reached = asyncio.get_running_loop().sock_connect(connection, place)
        try:
            await asyncio.wait_for(reached, ATTEMPT_SECONDS)
        except (TimeoutError, asyncio.TimeoutError):  # two classes in Python 3.10
            return TIMED_OUT
        except ConnectionRefusedError:
            return REFUSED
        except OSError as error:
            return _describe(error)
    return None


def _socket_for(address: str) -> tuple[socket.socket, Any]:
    """A socket of the address's family, and the address as sockets take it."""
    host, port = parse_address(address)
    family, kind, _, _, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind)
    made.setblocking(False)
    return made, place


def _describe(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _port_range() -> list[int] | None:
    try:
        first, last = map(int, _PORT_RANGE.read_text().split())
    except (OSError, ValueError):  # not Linux
        return None
    return [first, last]
