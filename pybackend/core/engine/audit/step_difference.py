"""Differences between values that should be equal, beyond rounding errors.

Rounding has no fixed size: a float32 sum over 8,000 rows differs by 3e-5 between one sum and two
halves. So what is not equal at once is measured against one process itself: by how much its float32
result differs from its own in float64 or, where a layer cannot compute in float64, from its own on
the same rows in another order. Rows are never changed: they have no rounding errors, and a `==` on
whole numbers stored as floats would give another loss.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Key = Any
Values = Mapping[Key, Array]

# Relative tolerance: float32 sums of a few hundred numbers in different orders differ by less.
_RELATIVE = 2e-5
# Half precision: errors of its sums are up to this many roundings.
_HALVES = 8.0
# Factor by which a difference may exceed that of one process with itself, and the bound on both:
# beyond it, a step is ill-conditioned, and nothing can be concluded from a difference.
_MARGIN = 8.0
_GROWN = 4.0
_BOUND = 1e-3
# A gradient that is zero in exact arithmetic, such as that of a bias before a normalization, has
# rounding errors of this size relative to the whole gradient.
_ZERO = 1e-6
# The same if layers compute in float64: a loss may still compute in float32.
_EXACT_ZERO = 1e-7
# Squares of such numbers overflow in float32.
_VAST = 1e18
# Relative rounding errors of an optimizer's update from the same gradients.
_UPDATE = 2e-4
PIECE = 1 << 16


class Measure(NamedTuple):
    """Two values that should be equal, and the size to which their difference is relative."""

    found: Array
    expected: Array
    scale: float
    tolerance: float = _RELATIVE
    is_gradient: bool = False

    @property
    def size(self) -> float:
        return self.relate(self.found, self.expected)

    def relate(self, one: Array, other: Array) -> float:
        distance = measure_distance(one, other)
        return distance / self.scale if self.scale else (np.inf if distance else 0.0)


@dataclass(frozen=True)
class Comparison:
    # Largest relative difference among everything that is equal, except `zeros`.
    largest: float = 0.0
    # The same among gradients that consist of rounding errors, relative to the whole gradient.
    zeros: float = 0.0
    # What differs, and what is ill-conditioned, with its difference, the largest first.
    differing: list[tuple[Key, float]] = field(default_factory=list)
    undecided: list[tuple[Key, float]] = field(default_factory=list)
    # If one process does not get the same result twice, nothing can be concluded.
    is_repeatable: bool = True


# Computes the expected values once more; None if that is impossible.
Again = Callable[[Literal["same", "float64", "order"]], "Values | None"]


def compare(measures: Mapping[Key, Measure], again: Again) -> Comparison:
    sizes = {key: one.size for key, one in measures.items()}
    whole = float(np.sqrt(sum(one.scale**2 for one in measures.values() if one.is_gradient)))
    # "Not at most", because NaN is neither larger nor smaller.
    suspects = [key for key, size in sizes.items() if not size <= measures[key].tolerance]
    differing = [key for key in suspects if not is_number(measures[key].found)]
    numbers = [key for key in suspects if key not in differing]
    zeros, undecided = 0.0, []
    if numbers:
        same = again("same")
        assert same is not None
        moved = [key for key, one in measures.items() if one.is_gradient or one.scale]
        pairs = [(measures[key], same[key]) for key in moved]
        unsteady = [one for one, two in pairs if not one.relate(two, one.expected) <= one.tolerance]
        # Threads add up in a different order each time; but random numbers change most values.
        if unsteady and 2 * len(unsteady) >= len(moved):
            return Comparison(is_repeatable=False)
        exact = again("float64")
        turned = again("order") if exact is None else None
        # An order says little about the gradient of one variable, but much about all of them.
        turns = 0.0 if turned is None else _measure_turns(measures, turned)
        # Where rounding errors grow, they reach all gradients, but not each in this one draw.
        spread = 0.0 if exact is None or not whole else _measure_turns(measures, exact) / whole
        for key in numbers:
            one = measures[key]
            other = exact if exact is not None else turned
            # In float64, the expected value is known better than the workers' type can say.
            truth = one.expected if exact is None else exact[key]
            noise = 0.0 if other is None else measure_distance(one.expected, other[key])
            if one.is_gradient:
                noise = turns if exact is None else max(noise, spread * one.scale)
            error = measure_distance(one.found, truth)
            allowed = one.tolerance * one.scale + _MARGIN * noise
            most = max(_BOUND, 4 * one.tolerance) * one.scale
            zero = _ZERO * whole if one.is_gradient else 0.0
            bound = max(most, zero)
            is_zero = exact is not None and _norm(truth) <= _EXACT_ZERO * whole
            if is_zero and noise >= _BOUND * one.scale:  # float32 may find exactly 0 by chance
                allowed = max(allowed, zero)
            overflows = not np.isfinite(error) and not _norm(truth) < _VAST
            # Rounding errors that grow in a deep network are spread unevenly.
            most_of_noise = allowed * (_GROWN if one.is_gradient and spread > _BOUND else 1.0)
            if overflows or (noise > bound and (error <= most_of_noise or exact is None)):
                undecided.append(key)
            elif error > min(allowed, bound):
                differing.append(key)
            elif error > most:
                zeros, sizes[key] = max(zeros, error / whole), 0.0
    left = {*differing, *undecided}
    largest = max((size for key, size in sizes.items() if key not in left), default=0.0)
    ranked = [
        sorted(((key, sizes[key]) for key in keys), key=lambda one: -one[1])
        for keys in (differing, undecided)
    ]
    return Comparison(largest, zeros, ranked[0], ranked[1])


def _measure_turns(measures: Mapping[Key, Measure], turned: Values) -> float:
    """Return how far another order of the rows, or another type, moves the whole gradient."""
    pairs = [(one.expected, turned[key]) for key, one in measures.items() if one.is_gradient]
    return float(np.sqrt(sum(measure_distance(*pair) ** 2 for pair in pairs)))


def measure_gradient(found: Array, expected: Array) -> Measure:
    scale = _norm(_finite(expected, expected)[0])
    return Measure(found, expected, scale, find_tolerance(expected), True)


def measure_variable(
    before: Array, found: Array, expected: Array, is_update: bool = False
) -> Measure:
    """Return the measure of a variable: relative to its change, and the rounding of its type.

    If ``is_update``, an optimizer has computed it from the gradients of the workers.
    """
    tolerance = max(find_tolerance(expected), _UPDATE if is_update else 0.0)
    scale = 0.0
    if is_number(expected):
        # Half precision has 8 bits or more.
        rounding = 2.0**-22 if expected.dtype.itemsize >= 4 else 2.0**-7
        change = measure_distance(*_finite(before, expected))
        scale = change + rounding * _norm(_finite(expected, expected)[0]) / tolerance
    return Measure(found, expected, scale, tolerance)


def find_tolerance(values: Array) -> float:
    if not is_number(values) or values.dtype.itemsize >= 4:
        return _RELATIVE
    return _HALVES * (2.0**-8 if values.dtype.name == "bfloat16" else 2.0**-11)


def _finite(one: Array, other: Array) -> tuple[Array, Array]:
    """Return two arrays with zeros wherever one of them is not finite."""
    keep = np.isfinite(one) & np.isfinite(other)
    return (one, other) if keep.all() else (np.where(keep, one, 0), np.where(keep, other, 0))


def _norm(values: Array) -> float:
    return float(np.sqrt(sum(float(one @ one) for (one,) in cut_pieces(values))))


def measure_distance(one: Array, other: Array) -> float:
    """Return the norm of the difference, treating NaNs and equal infinities as equal."""
    if one.shape != other.shape:
        return np.inf
    if not is_number(one):
        return 0.0 if np.array_equal(one, other) else np.inf
    total = 0.0
    for left, right in cut_pieces(one, other):
        with np.errstate(invalid="ignore"):
            difference = left - right
        square = float(difference @ difference)
        if not np.isfinite(square):
            is_same = (left == right) | (np.isnan(left) & np.isnan(right))
            difference[is_same] = 0.0
            square = float(difference @ difference)
        total += square
    return float(np.sqrt(total)) if np.isfinite(total) else np.inf


def cut_pieces(*arrays: Array) -> Iterator[list[Array]]:
    """Yield parts of arrays as float64, which fit into the processor's cache."""
    flat = [one.reshape(-1) for one in arrays]
    for first in range(0, len(flat[0]), PIECE):
        yield [one[first : first + PIECE].astype(np.float64) for one in flat]


def is_number(values: Array) -> bool:
    return values.dtype.kind == "f" or values.dtype.name == "bfloat16"


def is_another(found: Sequence[Array], again: Sequence[Array], tolerance: float = _BOUND) -> bool:
    """Return whether gradients, taken together, differ from those of a repetition."""
    if len(found) != len(again):
        return True
    pairs = list(zip(found, again, strict=True))
    distance = np.sqrt(sum(measure_distance(one, other) ** 2 for one, other in pairs))
    size = np.sqrt(sum(_norm(one) ** 2 for one in found))
    return bool(distance > tolerance * size)
