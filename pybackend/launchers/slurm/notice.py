"""How long before the end of its time a job is told so."""

from __future__ import annotations

import math
import re
from typing import Any

# Slurm may be as much too early.
_EARLY_SECONDS = 60
# Of a shorter job a notice would take too much.
_SHORTEST_MINUTES = 10


def signal_option(time: Any, seconds: float, target: str = "") -> str | None:
    """sbatch's option ``signal`` for a job with a limit in time; None if that is too short.

    Parameters
    ----------
    time
        The limit as sbatch has it; None: the partition's, of a day or so.
    seconds
        From the notice to the end.
    target
        ``"B:"`` for the batch script, and not its steps.
    """
    minutes = None if time is None else read_minutes(str(time))
    if minutes is not None and minutes < _SHORTEST_MINUTES:
        return None
    return f"{target}TERM@{math.ceil(seconds)}"


def notice_seconds(option: Any) -> float:
    """How long before the end of a job a notice by ``signal`` may come; 0 if none does."""
    found = re.search(r"@(\d+)", str(option or ""))
    return 0.0 if found is None else int(found[1]) + _EARLY_SECONDS


def read_minutes(time: str) -> float:
    """A limit such as ``"90"``, ``"1:30:00"`` or ``"2-12:00"``; infinite if it is another word."""
    if not re.fullmatch(r"[\d:-]+", time):
        return math.inf
    days, dash, rest = time.rpartition("-")
    parts = [int(part or 0) for part in rest.split(":")]
    if dash or len(parts) == 3:  # hours, minutes, seconds
        weights = (60.0, 1.0, 1 / 60)
    else:
        weights = (1.0, 1 / 60, 0.0)
    return int(days or 0) * 1440 + sum(w * p for w, p in zip(weights, parts, strict=False))
