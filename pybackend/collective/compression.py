"""Compression to half precision, without a loss in the long run.

Rounding errors are stored and added the next time: error feedback, as in Seide et al., "1-bit
stochastic gradient descent" (2014), and Karimireddy et al., "Error feedback fixes SignSGD and other
gradient compression schemes" (2019).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np

from pybackend.collective.buffers import Array
from pybackend.collective.half import BLOCK, Bf16, Fp16, HalfFormat
from pybackend.errors import InputError

Kind = Literal["fp16", "bf16"]


class Compression:
    """Codec for one series of all-reduces of float32 buffers.

    Sums are float32 at every hop; the error of each partial sum that this rank rounds is stored in
    this rank's residual, which is added to the next buffer of the same length. So the result on all
    ranks, summed over many steps, differs from the true sum by the rounding of one step. Finite
    values too large for the format are clipped and the rest goes to the residual; infinities and
    NaNs pass unchanged and leave no residual.

    Parameters
    ----------
    kind
        ``"fp16"`` (IEEE half precision: 11 bits of significand, up to 65504) or ``"bf16"``
        (8 bits, the range of float32; needs ``ml_dtypes``).
    """

    def __init__(self, kind: Kind) -> None:
        if kind not in ("fp16", "bf16"):
            raise InputError(f'compression must be "fp16" or "bf16", not {kind!r}')
        self.kind: Kind = kind
        self._format: HalfFormat = Fp16() if kind == "fp16" else Bf16()
        self._residuals: dict[int, Array] = {}
        self._wires: dict[int, Array] = {}
        self._wide = np.empty(BLOCK, np.float32)
        self._finite = np.empty(BLOCK, np.bool_)

    @property
    def itemsize(self) -> int:
        """Bytes of an encoded element."""
        return self._format.dtype.itemsize

    def residual(self, length: int) -> Array:
        """Return the residual for buffers of a length; float32, zeros at first."""
        if length not in self._residuals:
            self._residuals[length] = np.zeros(length, np.float32)
        return self._residuals[length]

    def read_residuals(self) -> dict[int, Array]:
        """Return a copy of the residuals, by the length of buffers."""
        return {length: residual.copy() for length, residual in self._residuals.items()}

    def restore_residuals(self, residuals: Mapping[int, Array]) -> None:
        """Continue with what `read_residuals` returned."""
        self._residuals = {length: residual.copy() for length, residual in residuals.items()}

    def wire(self, length: int) -> Array:
        """Return memory for the encoded form of buffers of a length."""
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

        ``values`` become the values that ``wire`` encodes, as on all ranks.
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
