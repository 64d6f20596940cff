"""What processes hold in the course of time, and whether it grows."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

FIGURES = ("memory_kb", "threads", "descriptors", "temporary_kb")
# Of the samples: caches fill, and code is loaded, before what happens repeats.
_WARM_UP = 0.3
# Slopes within so many standard errors of zero are noise.
_NOISE = 3.0
# Growth over all that was measured which is none: an allocator takes memory in pieces.
_ALLOWED = {"memory_kb": 4096.0, "threads": 1.0, "descriptors": 1.0, "temporary_kb": 64.0}
Sample = Mapping[str, float]


def sample(pid: int, folder: Path) -> Sample:
    """What a process holds now, and the files in a folder."""
    entry = Path("/proc", str(pid))
    pages = int((entry / "statm").read_text().split()[1])
    return {
        "memory_kb": pages * os.sysconf("SC_PAGE_SIZE") / 1024,
        "threads": len(os.listdir(entry / "task")),
        "descriptors": len(os.listdir(entry / "fd")),
        "temporary_kb": measure_folder(folder) / 1024,
    }


def measure_folder(folder: Path) -> int:
    """Bytes of all files below a folder."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # it may go in between
            found += path.lstat().st_size
    return found


def slopes(samples: Sequence[Sample], times: Sequence[float]) -> dict[str, float]:
    """Growth of each figure by a unit of ``times``, and how many of them grow beyond noise."""
    first = int(len(samples) * _WARM_UP)
    at = np.array(times[first:], float)
    found: dict[str, float] = {}
    growing = 0
    for name in FIGURES:
        values = np.array([one[name] for one in samples[first:]], float)
        (slope, start), noise = np.polyfit(at, values, 1), 0.0
        rest = values - (slope * at + start)
        spread = np.sqrt(((at - at.mean()) ** 2).sum())
        noise = np.sqrt((rest**2).sum() / max(1, len(at) - 2)) / spread
        found[name] = float(slope)
        total = slope * (at[-1] - at[0])
        growing += bool(slope > _NOISE * noise and total > _ALLOWED[name])
    return {**found, "first_mb": samples[first]["memory_kb"] / 1024, "growing": float(growing)}
