"""Packed environments that hosts read from the driver, over authenticated connections.

`ServedArchive` is imported on the workers' hosts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field

from pybackend.core.errors import ClusterError
from pybackend.core.launchers.environment.archive import PackedEnvironment
from pybackend.core.launchers.environment.installing import read_blocks
from pybackend.core.net.authentication import RejectedError, new_token
from pybackend.core.net.rendezvous import Acceptor, address_of, connect, listen
from pybackend.core.net.stream import Stream

_PURPOSE = "environment"
_CONNECT_SECONDS = 10.0
_PAUSE_SECONDS = 0.5
# For a block: a host may be slow to unpack, or the driver may be stopped for a while.
_BLOCK_SECONDS = 120.0
_BLOCK = 256 << 10


class UnreachedError(ClusterError):
    """A host cannot connect to the driver."""


@dataclass(frozen=True)
class ServedArchive:
    """A packed environment, of ``size`` bytes, that the driver sends from ``address``."""

    address: str
    token: str = field(repr=False)
    size: int

    def read(self) -> Iterator[bytes]:
        """Yield the content in blocks.

        Raises
        ------
        ClusterError
            The driver cannot be reached (`UnreachedError`), or was lost.
        """
        stream = self._connect()
        rest = self.size
        try:
            while rest:
                block = stream.read_exactly(min(_BLOCK, rest), _BLOCK_SECONDS)
                rest -= len(block)
                yield block
        except OSError as error:
            raise ClusterError(
                f"{os.uname().nodename} lost the driver at {self.address}, which was sending the "
                f"Python environment: {error}. If the driver is still running, start again"
            ) from error
        finally:
            stream.close()

    def _connect(self) -> Stream:
        deadline = time.monotonic() + _CONNECT_SECONDS
        while True:
            try:
                return connect(self.address, self.token, 0, _PURPOSE, _CONNECT_SECONDS)
            except (OSError, ValueError) as error:  # a name that is too long is a `ValueError`
                # The driver closes connections while too many others greet it: of many hosts, some
                # cannot reach it at once.
                is_closed = isinstance(error, ConnectionError)
                is_answer = isinstance(error, RejectedError | ConnectionRefusedError)
                if not is_closed or is_answer or time.monotonic() > deadline:
                    raise UnreachedError(
                        f"{os.uname().nodename} cannot connect to the driver at {self.address}: "
                        f"{error}"
                    ) from error
            time.sleep(_PAUSE_SECONDS)


class ArchiveServer:
    """Server of a packed environment, for those who know its token; a context manager.

    Parameters
    ----------
    packed
        The environment.
    host, announced
        As in `MeetingServer`.

    Attributes
    ----------
    archive
        For the hosts.

    Raises
    ------
    ClusterError
        ``host`` is not an address of this machine.
    """

    def __init__(self, packed: PackedEnvironment, host: str, announced: str | None) -> None:
        server, token = listen(host), new_token()
        self.archive = ServedArchive(address_of(server, announced), token, packed.size)
        self._path = packed.path
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._is_closed = False
        self._acceptor = Acceptor(server, token, _PURPOSE, self._welcome)

    def __enter__(self) -> ArchiveServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._acceptor.close()
        with self._lock:
            self._is_closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()

    def _welcome(self, stream: Stream, _: int) -> None:
        with self._lock:
            is_closed = self._is_closed
            self._streams.add(stream)
        if is_closed:
            stream.close()
        # Not on the thread of the greeting: their number is limited.
        threading.Thread(target=self._send, args=(stream,), daemon=True).start()

    def _send(self, stream: Stream) -> None:
        with suppress(OSError):
            for block in read_blocks(self._path):
                stream.send_all(block, _BLOCK_SECONDS)
        stream.close()
        with self._lock:
            self._streams.discard(stream)
