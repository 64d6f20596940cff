"""Values as bytes come back unchanged: types, shapes and bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from pybackend.core.errors import SerializationError
from pybackend.core.job.value_codec import decode_state, encode_state

STATE = {
    "none": None,
    1: [True, -3, 2.5, float("inf"), "ü"],
    ("a", 2): (b"\x00\xff", {4, 5}, frozenset(["x"])),
    "arrays": [
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.array(1.5),
        np.zeros((0, 3), bool),
        np.array(["ab", "c"]),
        np.array(["2026-01-01"], "M8[D]"),
        np.array([["ab", None]], object),
        np.array([1, 2.5], ml_dtypes.bfloat16),
    ],
    "numbers": [np.float32(0.1), np.int64(3), np.float64("nan")],
}


def test_a_state_comes_back_as_it_was() -> None:
    found = decode_state(encode_state(STATE))
    assert repr(found) == repr(STATE)
    for one, other in zip(found["arrays"], STATE["arrays"], strict=True):
        assert one.dtype == other.dtype
        assert one.dtype == object or one.tobytes() == other.tobytes()
        assert one.flags.writeable
    assert [type(number) for number in found["numbers"]] == [np.float32, np.int64, np.float64]


@pytest.mark.parametrize("value", [object(), [print], {"a": np.array([print])}, np.dtype("i4")])
def test_code_and_objects_are_no_plain_data(value: Any) -> None:
    with pytest.raises(SerializationError, match=r"the state.* is a .*cannot be sent"):
        encode_state(value)


@pytest.mark.parametrize("end", [0, 7, 15, 40, -1])
def test_a_part_of_a_state_is_refused(end: int) -> None:
    with pytest.raises(SerializationError, match="is damaged"):
        decode_state(encode_state(STATE)[:end])


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 100_000,
        b'{"array": ["<f4", [1180591620717411303424], 8]}',
        b'{"array": ["<f4", [-1], 8]}',
        b'{"array": [",f4", [2], 8]}',
        b'{"array": ["O", [1], 8]}',
        b'{"array": ["<f4", [2], -8]}',
        b'{"bytes": [9]}',
        b'{"dataclass": ["a", "b", [], 8]}',
        b"[0, []] ",
    ],
    ids=[
        "too deep",
        "too large",
        "negative",
        "no type",
        "objects",
        "negative size",
        "longer than it is",
        "a kind of functions only",
        "more than it says",
    ],
)
def test_a_header_of_another_form_is_refused(header: bytes) -> None:
    with pytest.raises(SerializationError, match="is damaged"):
        decode_state(b"tfdist-2" + len(header).to_bytes(8, "little") + header + bytes(8))
