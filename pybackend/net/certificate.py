"""Key and certificate by which the processes of one job authenticate each other in TLS.

TLS needs a certificate, and a job has a token. So both ends derive the same key from the token: a
private key on the curve P-256, and a self-signed certificate for it. Nothing is sent, stored or
installed for it, and processes without the token have neither. Only this derivation is done here;
OpenSSL handles connection keys, encryption and verification.
"""

from __future__ import annotations

import base64
import hashlib
import hmac

_Point = tuple[int, int]

# FIPS 186-4, D.1.2.3: the prime, the order, and the generator; the curve's a is -3.
_PRIME = 2**256 - 2**224 + 2**192 + 2**96 - 1
_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551
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
    """Return the certificate and the private key of a job, in PEM, the same on every host.

    It is always valid: the token ends with its job, and clocks of hosts may be wrong.
    """
    private = _derive(token, "key")
    public = b"\x00\x04" + b"".join(map(_to_bytes, multiply(private, _GENERATOR)))
    name = _der(_SEQUENCE, _der(_SET, _der(_SEQUENCE, _COMMON_NAME, _der(_UTF8, b"tfdist"))))
    times = [_der(_TIME, moment) for moment in (b"19700101000000Z", b"99991231235959Z")]
    algorithm = _der(_SEQUENCE, _ECDSA_WITH_SHA256)
    content = _der(
        _SEQUENCE,
        _der_integer(1),
        algorithm,
        name,
        _der(_SEQUENCE, *times),
        name,
        _der(_SEQUENCE, _der(_SEQUENCE, _EC_PUBLIC_KEY, _P256), _der(_BITS, public)),
    )
    signature = _der(_BITS, b"\x00", _sign(private, token, content))
    certificate = _der(_SEQUENCE, content, algorithm, signature)
    # RFC 5915.
    key = _der(
        _SEQUENCE,
        _der_integer(1),
        _der(_OCTETS, _to_bytes(private)),
        _der(0xA0, _P256),
        _der(0xA1, _der(_BITS, public)),
    )
    return _pem("CERTIFICATE", certificate), _pem("EC PRIVATE KEY", key)


def multiply(factor: int, point: _Point) -> _Point:
    """Multiply a point of the curve; ``factor`` is at least 1 and below the order."""
    found: _Point | None = None
    while factor:
        if factor & 1:
            found = point if found is None else _add(found, point)
        point = _add(point, point)
        factor >>= 1
    assert found is not None
    return found


def _add(one: _Point, other: _Point) -> _Point:
    """Return the sum of two points that are not each other's negatives."""
    if one == other:
        slope = (3 * one[0] * one[0] - 3) * pow(2 * one[1], -1, _PRIME)
    else:
        slope = (other[1] - one[1]) * pow(other[0] - one[0], -1, _PRIME)
    x = (slope * slope - one[0] - other[0]) % _PRIME
    return x, (slope * (one[0] - x) - one[1]) % _PRIME


def _sign(private: int, token: str, content: bytes) -> bytes:
    """Sign by ECDSA; for the only message of a key, the nonce must be secret, not random."""
    once = _derive(token, "signature")
    digest = int.from_bytes(hashlib.sha256(content).digest(), "big")
    first = multiply(once, _GENERATOR)[0] % _ORDER
    second = pow(once, -1, _ORDER) * (digest + first * private) % _ORDER
    return _der(_SEQUENCE, _der_integer(first), _der_integer(second))


def _derive(token: str, purpose: str) -> int:
    """Derive a secret number from 1 to the order less 1; from 512 bits, so it is uniform."""
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
