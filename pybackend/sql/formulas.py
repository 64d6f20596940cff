"""Functions of one number, as SQL that does not overflow in any dialect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

# Largest exponent of e that fits into a float32. PostgreSQL raises an error for larger ones.
_MOST = 88.72
# The largest number of float32.
LARGEST = 3.4028234663852886e38
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805


@dataclass(frozen=True)
class Words:
    """Names that differ between dialects.

    Attributes
    ----------
    greatest, least
        Functions of several numbers.
    """

    greatest: str = "greatest"
    least: str = "least"

    def apply(self, function: str, constants: tuple[float, ...], x: str) -> str:
        """Return the formula for a function by its name; ``x`` is a name, or in parentheses."""
        return FORMULAS[function](self, x, *(number(c) for c in constants))

    def at_most(self, x: str, most: object) -> str:
        """Return the smaller of two."""
        return f"{self.least}({x}, {most})"

    def at_least(self, x: str, least: object) -> str:
        """Return the larger of two."""
        return f"{self.greatest}({x}, {least})"

    def exp(self, x: str) -> str:
        """Return e to the power of a number that may be large or small."""
        return f"exp({self.clip(x, -_MOST, _MOST)})"

    def fade(self, x: str) -> str:
        """Return e to the power of a number that is not positive."""
        return f"exp({self.at_least(x, -_MOST)})"

    def clip(self, x: str, least: float, most: float) -> str:
        """Limit a number to a range."""
        return self.at_least(self.at_most(x, most), least)


def number(value: float) -> str:
    """Return a number for any dialect of SQL, with all its digits."""
    text = repr(float(value))
    return f"({text})" if text.startswith("-") else text


def _bend(w: Words, x: str, scale: str, alpha: str) -> str:
    below = f"{scale} * {alpha} * ({w.fade(x)} - 1)"
    return f"CASE WHEN {x} > 0 THEN {scale} * {x} ELSE {below} END"


def _softplus(w: Words, x: str) -> str:
    return f"({w.at_least(x, 0)} + ln(1 + {w.fade(f'-abs({x})')}))"


# Coefficients of the error function, in powers of 1 / (1 + p |x|); error below 1.5e-7 (Abramowitz
# and Stegun 1964, formula 7.1.26).
_ERF_P = 0.3275911
_ERF = (1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592)


def _gelu(w: Words, x: str) -> str:
    """Return a number times the normal distribution function of that number."""
    t = f"(1 / (1 + {number(_ERF_P / 2**0.5)} * abs({x})))"
    powers = number(_ERF[0])
    for coefficient in _ERF[1:]:
        powers = f"({powers} * {t} + {number(coefficient)})"
    tail = f"0.5 * {powers} * {t} * {w.fade(f'-0.5 * {x} * {x}')}"
    return f"{x} * (CASE WHEN {x} > 0 THEN 1 - {tail} ELSE {tail} END)"


FORMULAS: dict[str, Callable[..., str]] = {
    "celu": lambda w, x, a: (
        f"CASE WHEN {x} > 0 THEN {x} ELSE {a} * ({w.fade(f'{x} / {a}')} - 1) END"
    ),
    "elu": lambda w, x, a: _bend(w, x, "1", a),
    "exponential": lambda w, x: w.exp(x),
    "gelu": _gelu,
    "hard_sigmoid": lambda w, x: f"{w.clip(f'{x} + 3', 0, 6)} / 6",
    "hard_silu": lambda w, x: f"{x} * {w.clip(f'{x} + 3', 0, 6)} / 6",
    "hard_tanh": lambda w, x: w.clip(x, -1, 1),
    "leaky_relu": lambda w, x, a: f"CASE WHEN {x} > 0 THEN {x} ELSE {a} * {x} END",
    "log_sigmoid": lambda w, x: f"{w.at_most(x, 0)} - ln(1 + {w.fade(f'-abs({x})')})",
    "mish": lambda w, x: f"{x} * tanh({_softplus(w, x)})",
    "relu": lambda w, x: w.at_least(x, 0),
    "relu6": lambda w, x: w.clip(x, 0, 6),
    "rsqrt": lambda w, x, a: f"1 / sqrt({x} + {a})",
    "selu": lambda w, x: _bend(w, x, number(_SELU_SCALE), number(_SELU_ALPHA)),
    "sigmoid": lambda w, x: f"1 / (1 + {w.exp(f'-{x}')})",
    "silu": lambda w, x: f"{x} / (1 + {w.exp(f'-{x}')})",
    "softplus": _softplus,
    "softsign": lambda w, x: f"{x} / (1 + abs({x}))",
    "tanh": lambda w, x: f"tanh({x})",
}
