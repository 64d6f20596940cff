"""Numbers, sizes, times and durations as text for people."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any


def show_number(value: float | None) -> str:
    """Format a number as ``12,345``, ``0.1235`` or ``1.2e-06``; a dash for None."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    if isinstance(value, int) or (value == int(value) and abs(value) < 1e15):
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show_value(value: Any) -> str:
    """Format a setting, e.g. ``yes``, ``0.001`` or, of a dict, ``kind Exchange, buckets 4``."""
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {show_value(one)}" for k, one in value.items() if one is not None)
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(show_value, value))}]"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def show_loss(value: float) -> str:
    """Format with four decimals, or four digits if that shows too little: 0.2912, 2.314e-05."""
    is_shown = not value or 5e-5 <= abs(value) < 1e6
    return f"{value:.4f}" if is_shown else f"{value:.4g}"


def show_bytes(number: float) -> str:
    """Format a number of bytes as ``2.3 GB``."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f} bytes"


def show_seconds(value: float | None, is_estimate: bool = False) -> str:
    """Format seconds as ``850 µs``, ``12.3 ms``, ``4.5 s``, ``3 min 12 s`` or ``2 h 5 min``.

    Estimates are in whole seconds and, from 100 s on, in whole minutes.
    """
    if value is None or not math.isfinite(value):
        return "–"
    if is_estimate:
        value = round(value) if value < 99.5 else 60 * round(value / 60)
    if value < 99.95:
        unit, size = next(
            ((u, s) for u, s in (("µs", 1e6), ("ms", 1e3)) if 0 < value * s < 999.5), ("s", 1)
        )
        return f"{value * size:.3g} {unit}"
    minutes, seconds = divmod(round(value), 60)
    # Hours without seconds.
    parts = [(minutes // 60, "h"), (minutes % 60, "min"), (seconds * (minutes < 60), "s")]
    return " ".join(f"{number:,} {unit}" for number, unit in parts if number)


def show_time(seconds: float) -> str:
    """Return a time since 1970 as local date and time, for tables."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
