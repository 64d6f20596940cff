"""TLS 1.3 between processes that know the same token, with a certificate derived from it.

TLS needs a certificate, and a job has a token. So both ends derive the same key from the token: a
private key on the curve P-256, and a self-signed certificate for it. Nothing has to be sent, stored
or installed for this, and processes without the token have neither the key nor the certificate.
Only the derivation is implemented here; OpenSSL handles connection keys, encryption and
verification. Python's `ssl` cannot compute the public key of a private one. `cryptography` can, and
is used where it is installed. tfdist does not depend on it: it is compiled, and hosts of workers
have only Python, TensorFlow and what Keras needs. Elsewhere, `multiply` does the same.

Each end presents the job's certificate, and accepts no other. So other processes and network
devices cannot read the data, or alter, repeat or drop a part of it unnoticed. OpenSSL works in
memory: the stream waits for the socket, and no thread holds the lock while waiting.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
import ssl
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import cast

from pybackend.core.net.stream import AlteredError, StreamEndError

_Point = tuple[int, int]
# x / z and y / z.
_Projective = tuple[int, int, int]

# FIPS 186-4, D.1.2.3: the prime, the order, b and the generator; the curve's a is -3.
_PRIME = 2**256 - 2**224 + 2**192 + 2**96 - 1
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
_B = 0x5AC635D8AA3A93E7B3EBBD55769886BC651D06B0CC53B0F63BCE3C3E27D2604B
_GENERATOR = (
    0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    0x4FE342E2FE1A7F9B8EE7EB4A7C0F9E162BCE33576B315ECECBB6406837BF51F5,
)
# Object identifiers in DER (RFC 5480, RFC 5758, X.520).
_EC_PUBLIC_KEY = bytes.fromhex("06072a8648ce3d0201")
_P256 = bytes.fromhex("06082a8648ce3d030107")
_ECDSA_WITH_SHA256 = bytes.fromhex("06082a8648ce3d040302")
_COMMON_NAME = bytes.fromhex("0603550403")
_INTEGER, _BITS, _OCTETS, _UTF8, _TIME, _SEQUENCE, _SET = 0x02, 0x03, 0x04, 0x0C, 0x18, 0x30, 0x31


def make_certificate(token: str) -> tuple[str, str]:
    """Return a job's certificate and private key in PEM format, the same on every host.

    The certificate never expires: the token is used for only one job, and the hosts' clocks may be
    wrong.
    """
    private = _derive(token, "key")
    public = b"\x00\x04" + b"".join(map(_to_bytes, _find_public(private)))
    name = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _COMMON_NAME, _der(_UTF8, b"tfdist"))))
    times = [_der(_TIME, moment) for moment in (b"19700101000000Z", b"99991231235959Z")]
    algorithm = _der(_SEQUENCE, _ECDSA_WITH_SHA256)
    own_key = _der(_SEQUENCE, _der(_SEQUENCE, _EC_PUBLIC_KEY, _P256), _der(_BITS, public))
    parts = _der_integer(1), algorithm, name, _der(_SEQUENCE, *times), name, own_key
    content = _der(_SEQUENCE, *parts)
    # A signature by this key would prove nothing: each end has the whole certificate, and OpenSSL
    # does not check how a certificate that it trusts is signed. So no secret is computed with.
    signature = _der(_BITS, b"\x00", _der(_SEQUENCE, _der_integer(1), _der_integer(1)))
    certificate = _der(_SEQUENCE, content, algorithm, signature)
    # RFC 5915.
    options = _der(0xA0, _P256), _der(0xA1, _der(_BITS, public))
    key = _der(_SEQUENCE, _der_integer(1), _der(_OCTETS, _to_bytes(private)), *options)
    return _pem("CERTIFICATE", certificate), _pem("EC PRIVATE KEY", key)


def _find_public(private: int) -> _Point:
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
    except ImportError:
        return multiply(private, _GENERATOR)
    found = ec.derive_private_key(private, ec.SECP256R1()).public_key().public_numbers()
    return found.x, found.y


def multiply(factor: int, point: _Point) -> _Point:
    """Multiply a point of the curve; ``factor`` is at least 1 and below the order.

    The steps do not depend on the factor: there are 256, each with the same two additions, and no
    branch or index is secret. The time of Python's integers depends on their values, so these are
    made random: a point has as many projective coordinates as there are numbers.
    """
    scale = secrets.randbelow(_PRIME - 1) + 1
    low = (0, scale, 0)  # the neutral element
    high = (point[0] * scale % _PRIME, point[1] * scale % _PRIME, scale)
    for bit in reversed(range(256)):
        mask = -(factor >> bit & 1)  # all bits, or none
        low, high = _choose(mask, high, low), _choose(mask, low, high)
        low, high = _add(low, low), _add(low, high)
        low, high = _choose(mask, high, low), _choose(mask, low, high)
    inverse = pow(low[2], _PRIME - 2, _PRIME)
    return low[0] * inverse % _PRIME, low[1] * inverse % _PRIME


def _choose(mask: int, one: _Projective, other: _Projective) -> _Projective:
    """Return the first point if all bits of the mask are set, the other one if none is."""
    x, y, z = ((a & mask) | (b & ~mask) for a, b in zip(one, other, strict=True))
    return x, y, z


def _add(one: _Projective, other: _Projective) -> _Projective:
    """Add any two points, also equal ones (Renes, Costello and Batina 2016, equation 1)."""
    (x1, y1, z1), (x2, y2, z2) = one, other
    xx, yy, zz = x1 * x2 % _PRIME, y1 * y2 % _PRIME, z1 * z2 % _PRIME
    xy, xz, yz = x1 * y2 + x2 * y1, (x1 * z2 + x2 * z1) % _PRIME, y1 * z2 + y2 * z1
    middle = 3 * (_B * zz - xz)
    line = 3 * (_B * xz - xx - 3 * zz)
    slope = 3 * (xx - zz)
    return (
        (xy * (yy - middle) - yz * line) % _PRIME,
        (slope * line + (yy + middle) * (yy - middle)) % _PRIME,
        (yz * (yy + middle) + xy * slope) % _PRIME,
    )


def _derive(token: str, purpose: str) -> int:
    """Derive a secret number from 1 to the order minus 1, from 512 bits so that it is uniform."""
    message = f"tfdist|tls|{purpose}".encode()
    drawn = hmac.new(token.encode(), message, hashlib.sha512).digest()
    return int.from_bytes(drawn, "big") % (_ORDER - 1) + 1


def _to_bytes(number: int) -> bytes:
    return number.to_bytes(32, "big")


def _der_integer(number: int) -> bytes:
    return _der(_INTEGER, number.to_bytes(number.bit_length() // 8 + 1, "big"))


def _der(tag: int, *parts: bytes) -> bytes:
    content = b"".join(parts)
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def _pem(label: str, content: bytes) -> str:
    text = base64.encodebytes(content).decode()
    return f"-----BEGIN {label}-----\n{text}-----END {label}-----\n"


# Maximum number of bytes of a record, which OpenSSL writes one at a time.
_RECORD = 1 << 14
_AT_ONCE = 16 * _RECORD


class Tls:
    """One end of a connection; the server is the listening end."""

    def __init__(self, token: str, is_server: bool) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = _contexts(token)[is_server]
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=is_server)
        # OpenSSL works on a connection for one thread at a time.
        self._lock = threading.Lock()
        self._is_full = True  # what came with the handshake may hold more

    def shake_hands(self) -> bool:
        """Continue the handshake; return whether the other end has proved that it knows the token.

        Raises `ConnectionError` if it does not know the token.
        """
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            return False
        except ssl.SSLError as error:
            raise ConnectionError(f"the TLS handshake failed ({_reason(error)})") from error
        return True

    def seal(self, buffers: list[memoryview]) -> int:
        """Encrypt as many bytes from some buffers as are sent in one go; return their number."""
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
            return self._outgoing.read()

    def put(self, content: memoryview) -> None:
        """Add bytes that were received."""
        with self._lock:
            self._incoming.write(content)

    def open(self, buffers: list[memoryview]) -> int:
        """Decrypt received bytes into some buffers; return their number, 0 if a record is partial.

        Raises `AlteredError` if a record was altered, repeated, moved or dropped in transit; none
        of it is in the buffers. Raises `StreamEndError` if the connection has ended.
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
        return self._is_full and bool(self._tls.pending() or self._incoming.pending)


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
    """Write a file that only this user can read, because OpenSSL reads keys only from files."""
    is_memory = hasattr(os, "memfd_create")
    memory = os.fdopen(os.memfd_create("tfdist"), "w") if is_memory else None
    with memory or tempfile.NamedTemporaryFile("w") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}" if is_memory else file.name
