"""One worker's view of its cluster: its own machine, and the other workers that it can reach.

`inspect_worker` runs on the workers, so this module imports neither TensorFlow nor numpy.

Both sides close a connection as soon as it is made. They neither read nor send data, so the
connections need no authentication.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

from pybackend.core.job.context import WorkerContext
from pybackend.core.tf_config import parse_address
from pybackend.doctor.machine import inspect_machine

ATTEMPT_SECONDS = 3.0
# All workers start within seconds of each other; the last ones find the others listening.
PATIENCE_SECONDS = 15.0
TIMED_OUT = f"timed out after {ATTEMPT_SECONDS:g} s"
REFUSED = "refused"
_AT_ONCE = 64
_RETRY_SECONDS = 0.1
_PORT_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def inspect_worker(context: WorkerContext) -> dict[str, Any]:
    """Return `inspect_machine` and `try_peers`, and ``rank``, ``address``, ``host``, ``hostname``
    and ``ports`` (first and last port that the system picks from, or None); run by `barrier_run`.
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
    return {"host": None, "hostname": socket.gethostname(), **inspect_machine()}


def try_peers(
    addresses: Sequence[str], rank: int, patience: float = PATIENCE_SECONDS
) -> dict[str, Any]:
    """Connect to all other workers while they connect to this one.

    ``addresses`` has ``host:port`` by rank. The launcher may already have bound this worker's own
    port, with SO_REUSEADDR but without listening. For ``patience`` seconds, refused connections are
    retried, and this worker listens until all others have connected; the call returns at most
    `ATTEMPT_SECONDS` later.

    Returns ``unreached``: dicts with ``rank`` and ``reason``; and ``listen_error``: why this worker
    could not listen, or None.
    """
    return asyncio.run(_try_peers(addresses, rank, time.monotonic() + patience))


async def _try_peers(addresses: Sequence[str], rank: int, deadline: float) -> dict[str, Any]:
    # Each worker begins with the next rank, so that not all connect to rank 0 at once.
    others = [(rank + step) % len(addresses) for step in range(1, len(addresses))]
    crowd = asyncio.Semaphore(_AT_ONCE)
    with ExitStack() as stack:
        listen_error, visits = None, None
        try:
            server = stack.enter_context(_listening(addresses[rank]))
            visits = asyncio.ensure_future(_welcome(server, len(others)))
        except OSError as error:
            listen_error = _describe(error)
        tries = (_find_reason(addresses[other], deadline, crowd) for other in others)
        reasons = await asyncio.gather(*tries)
        if visits is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(visits, max(0.0, deadline - time.monotonic()))
    unreached = [
        {"rank": other, "reason": reason}
        for other, reason in sorted(zip(others, reasons, strict=True))
        if reason is not None
    ]
    return {"unreached": unreached, "listen_error": listen_error}


def _listening(address: str) -> socket.socket:
    server, target = _socket_for(address)
    try:
        # The launcher may have bound the port already, with this option but without listening.
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind(target)
        server.listen(1024)
    except BaseException:
        server.close()
        raise
    return server


async def _welcome(server: socket.socket, expected: int) -> None:
    for _ in range(expected):
        connection, _ = await asyncio.get_running_loop().sock_accept(server)
        connection.close()


async def _find_reason(address: str, deadline: float, crowd: asyncio.Semaphore) -> str | None:
    """Return why an address was not reached; None if it was."""
    # If hundreds time out, the last are not tried.
    reason: str | None = "no time was left to try it"
    while time.monotonic() < deadline:
        async with crowd:
            reason = await _attempt(address)
        if reason != REFUSED:
            break
        await asyncio.sleep(_RETRY_SECONDS)  # it may not listen yet
    return reason


async def _attempt(address: str) -> str | None:
    connection, target = _socket_for(address)
    with connection:
        reached = asyncio.get_running_loop().sock_connect(connection, target)
        try:
            await asyncio.wait_for(reached, ATTEMPT_SECONDS)
        except TimeoutError:
            return TIMED_OUT
        except ConnectionRefusedError:
            return REFUSED
        except OSError as error:
            return _describe(error)
    return None


def _socket_for(address: str) -> tuple[socket.socket, Any]:
    """Return a socket for the address family, and the address in the form that sockets take."""
    host, port = parse_address(address)
    family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    made = socket.socket(family, kind)
    made.setblocking(False)
    return made, target


def _describe(error: OSError) -> str:
    return (error.strerror or str(error)).lower()


def _port_range() -> list[int] | None:
    try:
        first, last = map(int, _PORT_RANGE.read_text().split())
    except (OSError, ValueError):  # not Linux
        return None
    return [first, last]
