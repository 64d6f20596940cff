"""Differences between two states that should be equal, beyond rounding errors."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Values = Mapping[int, Array]

# Relative to a variable's change: float32 sums of a few hundred numbers in different orders differ
# by less.
_RELATIVE = 2e-5
# Types that round more are half precision; errors of their sums are up to this many roundings.
_HALF = 2.0**-12
_HALVES = 8.0
# Factor by which a difference may exceed that of one process with itself.
_MARGIN = 8.0
_PIECE = 1 << 20
# Relative tolerance for a step, or an element of its gradient, that is more than rounding errors;
# and for the weights that such elements change.
_SURE = 1e-3
_CLOSE = 1e-2


@dataclass(frozen=True)
class Difference:
    """Difference between two values of one variable.

    Attributes
    ----------
    key
        Identity of the variable.
    size
        Size of the difference, relative to the variable's change and the rounding of its type.
    """

    key: int
    size: float


@dataclass(frozen=True)
class Comparison:
    """Result of a comparison.

    Attributes
    ----------
    largest
        Largest difference among variables that are equal except for rounding.
    differing
        Variables that differ, largest difference first.
    is_repeatable
        True if one process gets the same result twice; otherwise nothing can be concluded.
    """

    largest: float
    differing: list[Difference]
    is_repeatable: bool = True


def compare_changes(
    before: Values,
    found: Values,
    expected: Values,
    disturb: Callable[[Sequence[int]], Iterable[Values]],
    precision: float,
) -> Comparison:
    """Compare the values of variables after a step with the expected ones.

    Parameters
    ----------
    disturb
        Returns the expected values of some variables again: first from an unchanged second
        computation, then from any number of computations with inputs changed by about their
        rounding.
    precision
        Relative rounding error of the type in which the model computes.
    """
    tolerance = max(_RELATIVE, precision * (_HALVES if precision > _HALF else 1))
    scales = {key: _find_scale(before[key], expected[key], tolerance) for key in found}

    def measure(one: Values, key: int) -> float:
        distance = _distance(one[key], expected[key])
        return distance / scales[key] if scales[key] else (np.inf if distance else 0.0)

    sizes = {key: measure(found, key) for key in found}
    suspects = [key for key in found if not sizes[key] <= tolerance]
    numbers = [key for key in suspects if is_number(found[key])]
    differing = [key for key in suspects if key not in numbers]
    if numbers:
        draws = iter(disturb(numbers))
        again = next(draws)
        # Threads add up in a different order each time; but random numbers change most variables.
        unsteady = sum(measure(again, key) > tolerance for key in numbers)
        moved_by_step = [
            key
            for key in found
            if is_number(found[key]) and not np.array_equal(before[key], expected[key])
        ]
        if unsteady and 2 * unsteady >= len(moved_by_step):
            return Comparison(0.0, [], is_repeatable=False)
        # A saturated activation shows the effect of rounding only in some draws.
        for one in itertools.chain([again], draws):
            numbers = [key for key in numbers if not sizes[key] <= _MARGIN * measure(one, key)]
            if not numbers:
                break
        differing += numbers
    # The size is meaningless for a variable that consists of rounding errors, unless all do.
    equal = [size for key, size in sizes.items() if key not in suspects]
    equal = equal or [size for key, size in sizes.items() if key not in differing]
    listed = [Difference(key, sizes[key]) for key in differing]
    return Comparison(max(equal, default=0.0), sorted(listed, key=lambda one: -one.size))


def is_another(before: Values, found: Values, again: Values, keys: Sequence[int]) -> bool:
    """Return whether a repeated step changed the variables, taken together, differently."""
    distance = sum(_distance(found[key], again[key]) ** 2 for key in keys)
    change = sum(_distance(found[key], before[key]) ** 2 for key in keys)
    return distance > _SURE**2 * change


def is_divided_rounding(
    before: Array, found: Array, expected: Array, kept: Sequence[tuple[Array, Array]]
) -> bool:
    """Return whether a weight differs only where its gradient is a mere rounding error.

    An optimizer such as Adam divides a gradient by its size, so such an error moves the weight as
    far as a real gradient does.

    Parameters
    ----------
    kept
        Optimizer state for each of the weight's elements, actual and expected; equal as whole
        arrays.
    """
    sure = np.ones(expected.shape, bool)
    for one, other in kept:
        sure &= np.abs(one.astype(np.float64) - other) <= _SURE * np.abs(other)
    change = float(np.linalg.norm((expected.astype(np.float64) - before)[sure]))
    distance = float(np.linalg.norm((found.astype(np.float64) - expected)[sure]))
    return bool(kept) and change > 0 and distance <= _CLOSE * change


def _find_scale(before: Array, expected: Array, tolerance: float) -> float:
    """Return the scale of a difference: a variable's change, and the rounding of its type."""
    if not is_number(expected):
        return 0.0
    # Half precision has 8 bits or more.
    rounding = 2.0**-22 if expected.dtype.itemsize >= 4 else 2.0**-7
    change, size = 0.0, 0.0
    for one, other in _pieces(before, expected):
        is_finite = np.isfinite(one) & np.isfinite(other)
        change += float(np.square(one - other, where=is_finite, out=np.zeros_like(one)).sum())
        size += float(np.square(other, where=is_finite, out=np.zeros_like(one)).sum())
    return float(np.sqrt(change) + rounding * np.sqrt(size) / tolerance)


def _distance(one: Array, other: Array) -> float:
    """Return the norm of the difference, treating NaNs and equal infinities as equal."""
    if one.shape != other.shape:
        return np.inf
    if not is_number(one):
        return 0.0 if np.array_equal(one, other) else np.inf
    total = 0.0
    for left, right in _pieces(one, other):
        is_same = (left == right) | (np.isnan(left) & np.isnan(right))
        with np.errstate(invalid="ignore"):
            total += float(np.square(np.where(is_same, 0.0, left - right)).sum())
    return float(np.sqrt(total)) if np.isfinite(total) else np.inf


def _pieces(one: Array, other: Array) -> Iterator[tuple[Array, Array]]:
    """Yield parts of two arrays as float64: a whole large array might not fit into memory."""
    flat, others = one.reshape(-1), other.reshape(-1)
    for first in range(0, len(flat), _PIECE):
        part = slice(first, first + _PIECE)
        yield flat[part].astype(np.float64), others[part].astype(np.float64)


def is_number(values: Array) -> bool:
    """Return whether an array has floating-point numbers."""
    return values.dtype.kind == "f" or values.dtype.name == "bfloat16"
