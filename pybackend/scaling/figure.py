"""The figure of a scaling measurement (needs matplotlib: the extra ``plots``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pybackend.job.report import PARTS
from pybackend.scaling.projection import Projection
from pybackend.scaling.rows import ScalingRow


def draw_scaling(rows: Sequence[ScalingRow], projection: Projection | None) -> Any:
    """Speed-ups beside linear ones, and a bar of parts for each row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    speed, parts = figure.subplots(1, 2)
    most = max(row.workers for row in (*rows, *(projection.rows if projection else ())))
    speed.plot([1, most], [1, most], color="0.6", linestyle=":", label="linear")
    for mode in dict.fromkeys(row.mode for row in rows):
        own = sorted((row for row in rows if row.mode == mode), key=lambda row: row.workers)
        line = speed.plot(
            [row.workers for row in own], [row.speedup for row in own], marker="o", label=mode
        )[0]
        found = [row for row in projection.rows if row.mode == mode] if projection else []
        if found:
            counts = [row.workers for row in found]
            options = {"color": line.get_color()}
            speed.plot(counts, [row.speedup for row in found], linestyle="--", **options)
            low, high = [r.speedup_low for r in found], [r.speedup_high for r in found]
            speed.fill_between(counts, low, high, alpha=0.2, **options)
    speed.set_xscale("log", base=2)
    speed.set_yscale("log", base=2)
    for axis in (speed.xaxis, speed.yaxis):
        axis.set_major_formatter("{x:g}")
    speed.set_xlabel("workers")
    speed.set_title("speed-up" + (" (dashed: projected)" if projection else ""))
    speed.legend()
    names = [f"{row.mode}\n{row.workers}" for row in rows]
    below = [0.0] * len(rows)
    for part in PARTS:
        values = [getattr(row, part) * 1e3 for row in rows]
        parts.bar(names, values, bottom=below, label=part)
        below = [b + v for b, v in zip(below, values, strict=True)]
    parts.set_ylabel("ms per step")
    parts.set_title("where the time of a step goes")
    parts.legend()
    return figure
