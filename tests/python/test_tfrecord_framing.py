"""CRC-32C of many pieces: the library and numpy agree, and TensorFlow accepts their results."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybackend.core.data.tfrecord import framing


@given(st.lists(st.binary(max_size=700), max_size=8))
def test_numpy_gives_what_the_library_gives(pieces: list[bytes]) -> None:
    library = pytest.importorskip("google_crc32c")
    content = b"".join(pieces)
    data = np.frombuffer(content, np.uint8)
    lengths = np.array([len(piece) for piece in pieces], np.int64)
    starts = np.cumsum(lengths) - lengths
    expected = [library.value(piece) for piece in pieces]
    assert framing.compute_crcs_by_numpy(data, starts, lengths).tolist() == expected
    assert (
        framing.compute_crcs_by_library(library.value, data, starts, lengths).tolist() == expected
    )
    assert (
        framing.compute_crcs_by_library(library.value, data.copy(), starts, lengths).tolist()
        == expected
    )


def test_known_values() -> None:
    # From RFC 3720, appendix B.4: 32 bytes of 0, of 0xFF, and from 0 to 31.
    pieces = [bytes(32), b"\xff" * 32, bytes(range(32))]
    data = np.frombuffer(b"".join(pieces), np.uint8)
    starts, lengths = np.arange(3) * 32, np.full(3, 32)
    found = framing.compute_crcs_by_numpy(data, starts, lengths)
    assert found.tolist() == [0x8A9136AA, 0x62A8AB43, 0x46DD794E]


def test_a_long_piece_among_short_ones() -> None:
    library = pytest.importorskip("google_crc32c")
    data = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8)
    starts, lengths = np.array([5, 0, 299_999]), np.array([299_000, 3, 1])
    found = framing.compute_crcs_by_numpy(data, starts, lengths)
    assert (
        found.tolist()
        == framing.compute_crcs_by_library(library.value, data, starts, lengths).tolist()
    )


def test_without_the_library_the_masked_checksums_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arguments: tuple[Any, ...] = (np.arange(99, dtype=np.uint8), np.array([0, 9]), np.array([9, 9]))
    expected = framing.compute_masked_crcs(*arguments)
    monkeypatch.setitem(sys.modules, "google_crc32c", None)
    framing._load_library.cache_clear()
    try:
        assert framing.compute_masked_crcs(*arguments).tolist() == expected.tolist()
    finally:
        monkeypatch.undo()
        framing._load_library.cache_clear()
