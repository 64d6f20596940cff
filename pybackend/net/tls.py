"""TLS 1.3 for a connection between processes that know the same token: bytes in, bytes out.

Each end presents the certificate of the job, and accepts no other one. So other processes and
network devices can neither read the data, nor alter, repeat or drop a part of it unnoticed. OpenSSL
works in memory: the stream waits for the socket, and no thread holds the lock while it waits.
"""

from __future__ import annotations

import os
import ssl
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import cast

from pybackend.net.certificate import make_certificate
from pybackend.net.connection_errors import AlteredError, StreamEndError

# Maximum number of bytes of a record, which OpenSSL writes one at a time.
_RECORD = 1 << 14
_AT_ONCE = 16 * _RECORD


class Tls:
    """One end of a connection.

    Parameters
    ----------
    token
        The job's secret.
    is_server
        Whether this is the listening end.
    """

    def __init__(self, token: str, is_server: bool) -> None:
        self._arrived, self._leaving = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = _contexts(token)[is_server]
        self._tls = context.wrap_bio(self._arrived, self._leaving, server_side=is_server)
        # OpenSSL works on a connection for one thread at a time.
        self._lock = threading.Lock()
        self._is_full = True  # what came with the handshake may hold more

    def shake_hands(self) -> bool:
        """Continue the handshake; return whether the other end has proved the token.

        Raises
        ------
        ConnectionError
            The other end does not know the token.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise ConnectionError(f"the TLS handshake failed ({_reason(error)})") from error
        return True

    def seal(self, buffers: list[memoryview]) -> int:
        """Encrypt as many bytes of some buffers as are sent at once; return their number."""
        taken = 0
        if len(buffers) > 1 and sum(map(len, buffers)) <= _RECORD:
            buffers = [memoryview(b"".join(buffers))]  # a header is not worth a record
        with self._lock:
            for buffer in buffers:
                end = min(len(buffer), _AT_ONCE - taken)
                for start in range(0, end, _RECORD):
                    self._tls.write(buffer[start : min(start + _RECORD, end)])
                taken += end
        return taken

    def take(self) -> bytes:
        """Return the bytes to send."""
        with self._lock:
            return self._leaving.read()

    def put(self, content: memoryview) -> None:
        """Add bytes that were received."""
        with self._lock:
            self._arrived.write(content)

    def open(self, buffers: list[memoryview]) -> int:
        """Decrypt received bytes into some buffers; return their number, 0 if a record is partial.

        Raises
        ------
        AlteredError
            A record was altered, repeated, moved or dropped in transit; nothing of it is in the
            buffers.
        StreamEndError
            The connection has ended.
        """
        filled = 0
        with self._lock:
            try:
                for buffer in buffers:
                    rest = buffer
                    while rest:
                        count = cast(int, self._tls.read(len(rest), rest))
                        if not count:
                            raise StreamEndError("the other end has closed the connection")
                        rest = rest[count:]
                        filled += count
            except ssl.SSLWantReadError:
                self._is_full = False
                return filled
            except ssl.SSLError as error:
                raise _explain(error) from error
            self._is_full = True
            return filled

    def has_pending(self) -> bool:
        """Return whether there may be more to decrypt without receiving more."""
        return self._is_full and bool(self._tls.pending() or self._arrived.pending)


def _explain(error: ssl.SSLError) -> AlteredError:
    reason = _reason(error)
    if "alert" in reason:
        return AlteredError(f"the other end received altered data ({reason})")
    return AlteredError(f"the received data is not what the other end sent ({reason})")


def _reason(error: ssl.SSLError) -> str:
    return (error.reason or str(error)).replace("_", " ").lower()


@lru_cache(maxsize=4)
def _contexts(token: str) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return the contexts of the connecting and of the listening end."""
    certificate, key = make_certificate(token)
    contexts = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    with _as_file(certificate + key) as path:
        for context in contexts:
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.check_hostname = False  # the key belongs to the job, not to a host
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(cadata=certificate)
            context.load_cert_chain(path)
    contexts[1].num_tickets = 0  # sessions are never resumed
    return contexts


@contextmanager
def _as_file(content: str) -> Iterator[str]:
    """Write a file that only this user can read: OpenSSL reads keys only from files."""
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("tfdist"), "w") as memory:
            memory.write(content)
            memory.flush()
            yield f"/proc/self/fd/{memory.fileno()}"
    else:
        with tempfile.NamedTemporaryFile("w") as file:
            file.write(content)
            file.flush()
            yield file.name
