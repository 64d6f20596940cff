"""Resources of processes over time, and their growth."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np

FIGURES = ("memory_kb", "threads", "descriptors", "temporary_kb")
# Share of samples left out at the beginning, while caches fill and code is loaded.
_WARM_UP = 0.3
# Slopes within this number of standard errors of zero are noise.
_NOISE = 3.0
# Total growth that does not count, because an allocator takes memory in pieces.
_ALLOWED = {"memory_kb": 4096.0, "threads": 1.0, "descriptors": 1.0, "temporary_kb": 64.0}
Sample = Mapping[str, float]


def sample(pid: int, folder: Path) -> Sample:
    """Measure the resources of a process, and the files in a folder."""
    entry = Path("/proc", str(pid))
    pages = int((entry / "statm").read_text().split()[1])
    return {
        "memory_kb": pages * os.sysconf("SC_PAGE_SIZE") / 1024,
        "threads": len(os.listdir(entry / "task")),
        "descriptors": len(os.listdir(entry / "fd")),
        "temporary_kb": measure_folder(folder) / 1024,
    }


def measure_folder(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    found = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # the file may be deleted meanwhile
            found += path.lstat().st_size
    return found


def slopes(samples: Sequence[Sample], times: Sequence[float]) -> dict[str, float]:
    """Return the growth of each value per unit of ``times``, and the number above noise."""
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
