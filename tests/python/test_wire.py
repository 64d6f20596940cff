"""Half precision in messages: exact conversions, and no loss over many steps."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from conftest import full
from hypothesis import given
from hypothesis import strategies as st
from test_collective import mesh, together

from pybackend.core.collective import Compression
from pybackend.core.collective.wire import BLOCK, Fp16
from pybackend.core.errors import InputError

KINDS: dict[str, tuple[Any, float]] = {
    "fp16": (np.float16, 65504.0),
    "bf16": (ml_dtypes.bfloat16, float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)),
}


def encode_fp16(values: Any) -> Any:
    """Encode values by blocks; return the bits."""
    halves = np.empty(len(values), np.float16)
    for start in range(0, len(values), BLOCK):
        block = slice(start, start + BLOCK)
        Fp16().encode(values[block], halves[block])
    return halves.view(np.uint16)


def test_every_half_is_widened_exactly() -> None:
    halves = np.arange(1 << 16, dtype=np.uint16).view(np.float16)
    wide = np.empty(1 << 16, np.float32)
    for start in range(0, len(halves), BLOCK):
        Fp16().decode(halves[start : start + BLOCK], wide[start : start + BLOCK])
    np.testing.assert_array_equal(wide.view(np.uint32), halves.astype("float32").view(np.uint32))


def test_rounding_is_that_of_numpy_at_every_number_and_midpoint() -> None:
    exact = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype("float32")
    middle = ((exact[:-1].astype("float64") + exact[1:]) / 2).astype("float32")
    for values in (exact, middle, np.nextafter(middle, 0), np.nextafter(middle, np.float32(1e9))):
        for signed in (values, -values):
            np.testing.assert_array_equal(
                encode_fp16(signed), signed.astype(np.float16).view(np.uint16)
            )


@given(st.lists(st.floats(-65504, 65504, width=32), min_size=1, max_size=100))
def test_rounding_is_that_of_numpy(values: list[float]) -> None:
    array = np.array(values, np.float32)
    np.testing.assert_array_equal(encode_fp16(array), array.astype(np.float16).view(np.uint16))


@pytest.mark.parametrize("kind", KINDS)
def test_what_rounding_takes_away_is_the_residual(kind: Any) -> None:
    codec = Compression(kind)
    values = np.random.default_rng(0).normal(size=1000).astype("float32")
    residual, wire = codec.residual(1000), codec.wire(1000)
    sent = values.copy()
    codec.encode(sent, wire, residual)
    np.testing.assert_array_equal(wire, values.astype(KINDS[kind][0]))
    np.testing.assert_array_equal(sent, wire.astype("float32"))
    np.testing.assert_array_equal(sent.astype("float64") + residual, values.astype("float64"))
    # It is sent with the next values.
    nothing = np.zeros(1000, np.float32)
    codec.encode(nothing, wire, residual)
    np.testing.assert_array_equal(nothing.astype("float64") + residual, values - sent)


@pytest.mark.parametrize("kind", KINDS)
def test_too_large_is_clipped_and_infinite_passes(kind: Any) -> None:
    codec = Compression(kind)
    largest = np.float32(KINDS[kind][1])
    beyond = np.float32(1e5) if kind == "fp16" else np.finfo(np.float32).max
    values = np.array([beyond, -beyond, np.inf, -np.inf, np.nan, 1], np.float32)
    residual, wire = codec.residual(6), codec.wire(6)
    codec.encode(values, wire, residual)
    np.testing.assert_array_equal(values, [largest, -largest, np.inf, -np.inf, np.nan, 1])
    np.testing.assert_array_equal(wire.astype("float32"), values)
    np.testing.assert_array_equal(residual, [beyond - largest, largest - beyond, 0, 0, 0, 0])


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(InputError, match='compression must be "fp16" or "bf16", not \'int8\''):
        Compression("int8")  # type: ignore[arg-type]


def reduce_often(members: Any, parts: Any, kind: Any) -> tuple[Any, list[Compression]]:
    """Return the sum over steps of all results, which are the same on all ranks, and the codecs."""
    steps, ranks, length = parts.shape
    codecs = [Compression(kind) for _ in range(ranks)]
    total = np.zeros(length)
    for step in range(steps):
        buffers = [part.copy() for part in parts[step]]
        together(
            members,
            lambda member, b=buffers: member.all_reduce(b[member.rank], codecs[member.rank]),
        )
        assert {buffer.tobytes() for buffer in buffers} == {buffers[0].tobytes()}
        total += buffers[0]
    return total, codecs


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("algorithm", ["auto", "ring", "doubling"])
@pytest.mark.parametrize("ranks", [full(2), 3, *map(full, (5, 8))])
def test_many_steps_lose_no_more_than_one(ranks: int, algorithm: str, kind: Any) -> None:
    rng = np.random.default_rng(ranks)
    # A constant that neither format represents exactly, and noise; several blocks in a segment.
    parts = (0.1 + rng.normal(size=(20, ranks, 150_001)) * 0.01).astype("float32")
    with mesh(ranks, algorithm=algorithm) as members:
        total, codecs = reduce_often(members, parts, kind)
    truth = parts.astype("float64").sum(axis=(0, 1))
    owed = sum(codec.residual(150_001).astype("float64") for codec in codecs)
    # The missing part is in the residuals, up to float32's own rounding.
    assert np.abs(total + owed - truth).max() < 20 * ranks * 2e-7
    # And it is not more than each rank's rounding of one partial sum.
    eps = float(ml_dtypes.finfo(KINDS[kind][0]).eps)
    assert np.abs(total - truth).max() < ranks * eps * 0.2 * ranks


@pytest.mark.parametrize("kind", KINDS)
def test_whole_numbers_are_exact(kind: Any) -> None:
    parts = np.random.default_rng(1).integers(-10, 10, (1, 4, 100_003)).astype("float32")
    with mesh(4, algorithm="ring") as members:
        total, _ = reduce_often(members, parts, kind)
    np.testing.assert_array_equal(total, parts.sum(axis=(0, 1)))


@pytest.mark.parametrize("size", [0, 1, 7])
def test_small_buffers(size: int) -> None:
    parts = np.ones((2, 3, size), np.float32)
    with mesh(3, algorithm="ring") as members:
        total, _ = reduce_often(members, parts, "bf16")
    assert total.tolist() == [6.0] * size


@pytest.mark.parametrize("kind", KINDS)
def test_infinite_sums_do_not_outlast_their_step(kind: Any) -> None:
    parts = np.ones((2, 3, 5000), np.float32)
    parts[0, 1, 10:20] = np.inf
    parts[0, 2, 15:30] = np.nan
    with mesh(3, algorithm="ring") as members:
        codecs = [Compression(kind) for _ in members]
        for step, part in enumerate(parts):
            buffers = [row.copy() for row in part]
            together(
                members,
                lambda member, b=buffers: member.all_reduce(b[member.rank], codecs[member.rank]),
            )
            for buffer in buffers:
                wanted = part.sum(axis=0)
                np.testing.assert_array_equal(buffer, wanted, err_msg=f"step {step}")
    for codec in codecs:
        assert np.isfinite(codec.residual(5000)).all()
