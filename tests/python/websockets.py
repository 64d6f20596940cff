"""The server's side of a WebSocket, as far as Kubernetes' `exec` needs it (RFC 6455)."""

from __future__ import annotations

import base64
import hashlib
import struct
import threading
from collections.abc import Iterator
from typing import IO

_BINARY, _CLOSE, _PING, _PONG = 2, 8, 9, 10
_GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


def accept_key(key: str) -> str:
    """Return the answer to a client's key, which shows that the server knows the protocol."""
    return base64.b64encode(hashlib.sha1((key + _GUID).encode()).digest()).decode()


class WebSocket:
    """An upgraded connection: messages of bytes, either way."""

    def __init__(self, reading: IO[bytes], writing: IO[bytes]) -> None:
        self._reading = reading
        self._writing = writing
        self._lock = threading.Lock()

    def send(self, content: bytes, opcode: int = _BINARY) -> None:
        """Send one message."""
        size = len(content)
        short = size if size < 126 else 126 if size < 1 << 16 else 127
        extended = {126: "!H", 127: "!Q"}.get(short)
        header = bytes([0x80 | opcode, short]) + (struct.pack(extended, size) if extended else b"")
        with self._lock:
            self._writing.write(header + content)

    def close(self) -> None:
        """Signal the end of the data."""
        self.send(struct.pack("!H", 1000), _CLOSE)

    def messages(self) -> Iterator[bytes]:
        """Yield the client's messages until it closes the connection."""
        while len(header := self._reading.read(2)) == 2:
            opcode, size = header[0] & 0x0F, header[1] & 0x7F
            assert header[0] & 0x80, "messages in pieces are not expected"
            if size > 125:
                size = int.from_bytes(self._reading.read(2 if size == 126 else 8), "big")
            mask = self._reading.read(4)
            content = self._reading.read(size)
            if len(content) < size or opcode == _CLOSE:
                return
            repeated = (mask * (size // 4 + 1))[:size]
            plain = int.from_bytes(content, "big") ^ int.from_bytes(repeated, "big")
            if opcode == _PING:
                self.send(plain.to_bytes(size, "big"), _PONG)
            elif opcode == _BINARY:
                yield plain.to_bytes(size, "big")
