"""Conversions between float32 and the two half-precision formats, in a few NumPy passes."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from pybackend.collective.buffers import Array
from pybackend.errors import InputError

BLOCK = 1 << 15
"""Largest number of elements converted at a time: intermediate results stay in a core's cache."""


class HalfFormat(Protocol):
    """Format of 16 bits."""

    dtype: np.dtype[Any]
    largest: np.float32

    def encode(self, values: Array, half: Array) -> None:
        """Round finite float32 values, at most ``largest``, to the nearest, ties to even."""

    def decode(self, half: Array, out: Array) -> None:
        """Widen to float32, exactly."""


class Fp16:
    """IEEE half precision: 11 bits of significand, up to 65504.

    NumPy's own conversion takes up to a hundred times longer, longest for small numbers.
    """

    dtype = np.dtype(np.float16)
    largest = np.float32(65504)

    def __init__(self) -> None:
        self._bits = np.empty(BLOCK, np.uint32)
        self._exponent = np.empty(BLOCK, np.uint32)
        self._magnitude = np.empty(BLOCK, np.float32)
        self._sign = np.empty(BLOCK, np.uint16)

    def encode(self, values: Array, half: Array) -> None:
        """Round float32 values to half precision.

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
        """Round float32 values to bfloat16."""
        np.copyto(half, values, casting="unsafe")

    def decode(self, half: Array, out: Array) -> None:
        """Widen to float32, exactly."""
        np.copyto(out, half)
