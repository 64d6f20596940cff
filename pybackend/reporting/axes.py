"""Numbers for people: round ticks for an axis, and figures in a few digits."""

from __future__ import annotations

import math

_ROUND = (1.0, 2.0, 2.5, 5.0, 10.0)


def choose_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most so many round numbers, and one more, that enclose a range."""
    if high - low <= 1e-12 * max(1.0, abs(low), abs(high)):
        pad = abs(low) / 10 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = power * next((one for one in _ROUND if one * power >= rough * (1 - 1e-9)), 10.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]


def choose_epochs(first: int, last: int, most: int = 8) -> list[int]:
    """Some of the epochs, evenly spread."""
    step = max(1, math.ceil((last - first) / most))
    return list(range(first, last + 1, step))


def show_number(value: float | int | None) -> str:
    """``12,345``, ``0.1235``, ``1.2e-06``; a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def show_seconds(value: float | None) -> str:
    """``850 µs``, ``12.3 ms``, ``4.5 s``, ``3 min 12 s``, ``2 h 5 min``."""
    if value is None or not math.isfinite(value):
        return "–"
    if value == 0:
        return "0 s"
    if value < 0.000_999_5:
        return f"{value * 1e6:.3g} µs"
    if value < 0.9995:
        return f"{value * 1e3:.3g} ms"
    if value < 99.95:
        return f"{value:.3g} s"
    minutes, seconds = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {seconds} s"
    return f"{minutes // 60:,} h {minutes % 60} min"
