"""A `Stream` over TLS, with a certificate made for one test run: the interface can carry it."""

from __future__ import annotations

import select
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from pybackend.net import dialing, rendezvous
from pybackend.net.stream import Stream, StreamEndError


class TlsStream(Stream):
    """OpenSSL works on a connection for one thread at a time: a lock, never held while waiting."""

    client: ssl.SSLContext
    server: ssl.SSLContext

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(connection)
        assert isinstance(connection, ssl.SSLSocket)
        self._tls = connection
        self._lock = threading.Lock()

    @classmethod
    def connect(cls, address: tuple[str, int], seconds: float) -> Stream:
        plain = socket.create_connection(address, seconds)
        options = {"server_hostname": address[0], "do_handshake_on_connect": False}
        return cls(cls.client.wrap_socket(plain, **options))

    @classmethod
    def accept(cls, server: socket.socket) -> Stream:
        plain = server.accept()[0]
        options = {"server_side": True, "do_handshake_on_connect": False}
        return cls(cls.server.wrap_socket(plain, **options))

    def send_some(self, buffers: list[memoryview]) -> int:
        try:
            with self._lock:
                count = self._tls.send(buffers[0])
        except ssl.SSLWantReadError:
            self.writes_on = select.POLLIN
            return 0
        except ssl.SSLWantWriteError:
            count = 0
        self.writes_on = select.POLLOUT
        return count

    def has_pending(self) -> bool:
        return super().has_pending() or self._tls.pending() > 0

    def _receive(self, buffers: list[memoryview]) -> int:
        try:
            with self._lock:
                count = self._tls.recv_into(buffers[0])
        except ssl.SSLWantWriteError:
            self.reads_on = select.POLLOUT
            return 0
        except ssl.SSLWantReadError:
            self.reads_on = select.POLLIN
            return 0
        if count == 0:
            raise StreamEndError("the other end has closed the connection")
        return count


def use_tls(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the package's connections TLS ones; skips the test if there is no `openssl`."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("no program `openssl` to make a certificate with")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = f"{openssl} req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1"
    names = ["-subj", "/CN=test", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*command.split(), *names, *files], check=True, capture_output=True)
    TlsStream.client = ssl.create_default_context(cafile=str(certificate))
    TlsStream.server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    TlsStream.server.load_cert_chain(certificate, key)
    for module in (dialing, rendezvous):
        monkeypatch.setattr(module, "Stream", TlsStream)
