"""Arrays as bytes on the wire, in half precision if requested.

Rounding errors are stored and added to the next buffer: error feedback, as in Seide et al., "1-bit
stochastic gradient descent" (2014), and Karimireddy et al., "Error feedback fixes SignSGD and other
gradient compression schemes" (2019).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pybackend.core.errors import InputError

Array = npt.NDArray[Any]
Terms = Callable[[int, Array], object]
"""Function that writes a rank's terms of a sum, from an element on, into an array."""

# Bytes that are sent, received and added at a time: few enough to stay in a core's cache.
CHUNK = 1 << 18
# Largest number of elements converted at a time: intermediate results stay in a core's cache.
BLOCK = 1 << 15


def view_bytes(array: Array) -> memoryview:
    """Return the memory of a contiguous array; an empty array has no memory to view."""
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(bytearray())


def split_chunks(raw: memoryview) -> list[memoryview]:
    return [raw[start : start + CHUNK] for start in range(0, len(raw), CHUNK)]


class Fp16:
    """IEEE half precision: 11 bits of significand, up to 65504.

    NumPy's own conversion takes up to a hundred times longer, and is slowest for small numbers.
    """

    dtype = np.dtype(np.float16)
    largest = np.float32(65504)

    def __init__(self) -> None:
        self._bits = np.empty(BLOCK, np.uint32)
        self._exponent = np.empty(BLOCK, np.uint32)
        self._magnitude = np.empty(BLOCK, np.float32)
        self._sign = np.empty(BLOCK, np.uint16)

    def encode(self, values: Array, half: Array) -> None:
        """Round finite float32 values of at most ``largest`` to nearest, ties to even.

        Adding 2^(e + 13) to a number of exponent e leaves its significand, rounded to 11 bits, in
        the lowest bits of the sum; with e = -14 at least, that holds for subnormal results too.
        """
        bits, exponent = self._bits[: len(values)], self._exponent[: len(values)]
        sign, result = self._sign[: len(values)], half.view(np.uint16)
        np.bitwise_and(values.view(np.uint32), np.uint32(0x7F800000), out=exponent)
        np.maximum(exponent, np.uint32((127 - 14) << 23), out=exponent)
        np.add(exponent, np.uint32(13 << 23), out=bits)
        rounded, magnitude = bits.view(np.float32), self._magnitude[: len(values)]
        np.add(rounded, np.abs(values, out=magnitude), out=rounded)
        # The significand contains its leading bit, so the exponent to add is less by one.
        np.right_shift(exponent, np.uint32(13), out=exponent)
        np.add(bits, exponent, out=bits)
        np.copyto(result, bits, casting="unsafe")
        np.subtract(result, np.uint16((127 - 14) << 10 & 0xFFFF), out=result)
        np.right_shift(values.view(np.uint32), np.uint32(16), out=bits)
        np.copyto(sign, bits, casting="unsafe")
        np.bitwise_and(sign, np.uint16(0x8000), out=sign)
        np.bitwise_or(result, sign, out=result)

    def decode(self, half: Array, out: Array) -> None:
        """Widen by a multiplication, which moves the exponent; it normalizes subnormals, too."""
        bits = out.view(np.int32)
        np.copyto(bits, half.view(np.int16))
        np.left_shift(bits, np.int32(13), out=bits)
        # The sign was extended over the exponent's upper bits.
        np.bitwise_and(bits, np.int32(-0x70000001), out=bits)
        np.multiply(out, np.float32(2.0**112), out=out)
        # Infinities and NaNs look like the next larger numbers.
        if len(out) and not (out.max() < 65536 and out.min() > -65536):
            np.copyto(out, half)


class Bf16:
    """Upper half of float32: 8 bits of significand, the same range."""

    def __init__(self) -> None:
        try:
            import ml_dtypes
        except ModuleNotFoundError as error:
            raise InputError(
                'compression "bf16" needs the package `ml_dtypes`, which comes with TensorFlow: '
                'install it, or use "fp16"'
            ) from error
        self.dtype = np.dtype(ml_dtypes.bfloat16)
        self.largest = np.uint32(0x7F7F0000).view(np.float32)

    def encode(self, values: Array, half: Array) -> None:
        np.copyto(half, values, casting="unsafe")

    def decode(self, half: Array, out: Array) -> None:
        np.copyto(out, half)


Kind = Literal["fp16", "bf16"]


class Compression:
    """Codec for one series of all-reduces of float32 buffers.

    Sums are float32 at every hop; the error of each partial sum that this rank rounds is stored in
    this rank's residual, which is added to the next buffer of the same length. So the result on all
    ranks, summed over many steps, differs from the true sum by the rounding of one step. Finite
    values too large for the format are clipped and the rest goes to the residual; infinities and
    NaNs pass unchanged and leave no residual.

    "fp16" is IEEE half precision (11 bits of significand, up to 65504). "bf16" has 8 bits and the
    range of float32; it needs ``ml_dtypes``.
    """

    def __init__(self, kind: Kind) -> None:
        if kind not in ("fp16", "bf16"):
            raise InputError(f'compression must be "fp16" or "bf16", not {kind!r}')
        self.kind: Kind = kind
        self._format: Fp16 | Bf16 = Fp16() if kind == "fp16" else Bf16()
        self._residuals: dict[int, Array] = {}
        self._wires: dict[int, Array] = {}
        self._wide = np.empty(BLOCK, np.float32)
        self._finite = np.empty(BLOCK, np.bool_)

    @property
    def itemsize(self) -> int:
        return self._format.dtype.itemsize

    def residual(self, length: int) -> Array:
        """Return the residual for buffers of a given length: float32, initially zeros."""
        if length not in self._residuals:
            self._residuals[length] = np.zeros(length, np.float32)
        return self._residuals[length]

    def read_residuals(self) -> dict[int, Array]:
        return {length: residual.copy() for length, residual in self._residuals.items()}

    def restore_residuals(self, residuals: Mapping[int, Array]) -> None:
        self._residuals = {length: residual.copy() for length, residual in residuals.items()}

    def wire(self, length: int) -> Array:
        """Return memory for encoding buffers of a given length."""
        if length not in self._wires:
            self._wires[length] = np.empty(length, self._format.dtype)
        return self._wires[length]

    def repay(self, buffer: Array) -> None:
        """Add the whole residual to a buffer that will be summed exactly, and clear it."""
        residual = self.residual(len(buffer))
        np.add(buffer, residual, out=buffer)
        residual.fill(0)

    def encode(self, values: Array, wire: Array, residual: Array) -> None:
        """Add the residual to up to `BLOCK` values and round them; the error is the new residual.

        ``values`` are set to the values that ``wire`` encodes, so that all ranks have the same
        ones.
        """
        wide, finite = self._wide[: len(values)], self._finite[: len(values)]
        largest = self._format.largest
        np.add(values, residual, out=wide)
        np.clip(wide, -largest, largest, out=values)
        self._format.encode(values, wire)
        self._format.decode(wire, values)
        np.subtract(wide, values, out=residual)
        if not np.isfinite(residual, out=finite).all():
            wrong = ~np.isfinite(wide)
            wire[wrong] = values[wrong] = wide[wrong]
            residual[wrong] = 0

    def decode(self, wire: Array, out: Array) -> None:
        """Decode up to `BLOCK` values to float32."""
        self._format.decode(wire, out)

    def add(self, wire: Array, out: Array) -> None:
        """Decode up to `BLOCK` values and add them to float32 values."""
        wide = self._wide[: len(wire)]
        self._format.decode(wire, wide)
        np.add(out, wide, out=out)
