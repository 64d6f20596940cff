"""Numbers for people: figures and seconds in a few digits."""

from __future__ import annotations

import math


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
