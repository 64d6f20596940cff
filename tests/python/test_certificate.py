"""The certificate derived from a token, checked with OpenSSL and published values."""

from __future__ import annotations

import ssl

import pytest

from pybackend.net.certificate import _GENERATOR, _ORDER, make_certificate, multiply
from pybackend.net.rendezvous import new_token

# Published test vectors of P-256: a factor, and the abscissa of that multiple of the generator.
POINTS = {
    1: 0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
    2: 0x7CF27B188D034F7E8A52380304B51AC3C08969E277F21B35A60B48FC47669978,
    3: 0x5ECBE4D1A6330A44C8F7EF951D4BF165E6C6B721EFADA985FB41661BC6E7FD6C,
    112233445566778899: 0x339150844EC15234807FE862A86BE77977DBFB3AE3D96F4C22795513AEAAB82F,
    _ORDER - 1: 0x6B17D1F2E12C4247F8BCE6E563A440F277037D812DEB33A0F4A13945D898C296,
}


@pytest.mark.parametrize("factor", POINTS)
def test_points_are_the_published_ones(factor: int) -> None:
    assert multiply(factor, _GENERATOR)[0] == POINTS[factor]


def test_a_token_gives_one_certificate_and_another_token_another() -> None:
    token = new_token()
    assert make_certificate(token) == make_certificate(token)
    assert not set(make_certificate(token)) & set(make_certificate(new_token()))


def test_openssl_reads_it_and_nothing_of_the_token_is_in_it() -> None:
    token = new_token()
    certificate, key = make_certificate(token)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(cadata=certificate)
    (found,) = context.get_ca_certs()
    assert found["notAfter"] == "Dec 31 23:59:59 9999 GMT"
    for text in (certificate, key):
        content = ssl.PEM_cert_to_DER_cert(text) if text == certificate else text.encode()
        assert token.encode() not in content
        assert bytes.fromhex(token) not in content
