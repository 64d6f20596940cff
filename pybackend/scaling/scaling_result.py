"""Result of `bench_scale`: a table, JSON, a figure, and a projection."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import pybackend
from pybackend.core.api.rendering import check_figure, save_figure
from pybackend.core.job.arguments import check_whole_number
from pybackend.core.job.report import PARTS
from pybackend.scaling.measured import ScalingRow
from pybackend.scaling.projection import Projection, project_rows


@dataclass(frozen=True)
class ScalingResult:
    """Measured step times of a training run by number of workers.

    Attributes
    ----------
    rows
        One `ScalingRow` per mode and number of workers.
    hosts
        Names of the workers' machines.
    """

    rows: list[ScalingRow]
    hosts: list[str]

    @cached_property
    def records(self) -> list[dict[str, Any]]:
        """The rows as plain data, for a data frame: ``pandas.DataFrame(result.records)``."""
        names = [field.name for field in fields(ScalingRow) if field.compare]
        return [{name: getattr(row, name) for name in names} for row in self.rows]

    def project(self, to: int = 480) -> Projection:
        """Predict step times with more workers, from a model of their parts fitted to the rows.

        The model knows no effects that appear only with more workers: a shared network, stragglers,
        buckets whose exchange is no longer hidden behind the backward pass.

        Parameters
        ----------
        to
            Largest number of workers.

        Raises
        ------
        InputError
            An argument is invalid, or too little was measured to fit the model.
        """
        return project_rows(self.rows, check_whole_number("to", to, least=2, most=1_000_000))

    def to_dict(self, projection: Projection | None = None) -> dict[str, Any]:
        """Return all values as plain data."""
        return {
            "tfdist": pybackend.__version__,
            "hosts": self.hosts,
            "unit": "seconds per step",
            "rows": self.records,
            **({} if projection is None else {"projection": asdict(projection)}),
        }

    def to_json(self, path: str | Path | None = None, projection: Projection | None = None) -> str:
        """Return all values as JSON text, and write it to ``path`` if given."""
        text = json.dumps(self.to_dict(projection), indent=2) + "\n"
        if path is not None:
            Path(path).write_text(text)
        return text

    def plot(self, path: str | Path | None = None, projection: Projection | None = None) -> Any:
        """Plot speed-ups and the parts of a step's time. Needs the extra ``plots``.

        Parameters
        ----------
        path
            File to write: .png, .pdf, .svg or another format that matplotlib supports.
        projection
            A projection to draw with the measured values.

        Returns
        -------
        matplotlib.figure.Figure

        Raises
        ------
        InputError
            matplotlib is missing, or does not support the file's type.
        """
        check_figure(path)
        figure = draw_scaling(self.rows, projection)
        if path is not None:
            save_figure(figure, path)
        return figure

    def __str__(self) -> str:
        heads = ("mode", "workers", "rows each", "ms", "rows/s", "speed-up", "efficiency")
        lines = ["".join(f"{name:>12}" for name in (*heads, *(f"{one}, %" for one in _SHORT)))]
        for row in self.rows:
            shares = [100 * getattr(row, part) / row.seconds for part in PARTS]
            mark = "*" if row.is_crowded else ""
            lines.append(
                f"{row.mode:>12}{f'{row.workers}{mark}':>12}{round(row.batch_size, 1):12g}"
                f"{row.seconds * 1e3:12.2f}{row.rows_per_second:12.0f}{row.speedup:12.2f}"
                f"{row.efficiency:12.2f}" + "".join(f"{share:12.1f}" for share in shares)
            )
        if any(row.is_crowded for row in self.rows):
            lines.append("* more workers than cores: workers share cores and slow each other down")
        return "\n".join(lines)


_SHORT = ("data", "compute", "comm.", "waiting")


def draw_scaling(rows: Sequence[ScalingRow], projection: Projection | None) -> Any:
    """Draw speed-ups compared with linear ones, and a bar of parts for each row."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    speed, parts = figure.subplots(1, 2)
    most = max(row.workers for row in (*rows, *(projection.rows if projection else ())))
    speed.plot([1, most], [1, most], color="0.6", linestyle=":", label="linear")
    for mode in dict.fromkeys(row.mode for row in rows):
        own = sorted((row for row in rows if row.mode == mode), key=lambda row: row.workers)
        counts, speedups = zip(*((row.workers, row.speedup) for row in own), strict=True)
        (line,) = speed.plot(counts, speedups, marker="o", label=mode)
        if found := [row for row in projection.rows if row.mode == mode] if projection else []:
            counts, speedups = zip(*((row.workers, row.speedup) for row in found), strict=True)
            speed.plot(counts, speedups, linestyle="--", color=line.get_color())
    title = "speed-up" + (" (dashed: projected)" if projection else "")
    speed.set(xlabel="workers", title=title)
    for axis, scale in ((speed.xaxis, speed.set_xscale), (speed.yaxis, speed.set_yscale)):
        scale("log", base=2)
        axis.set_major_formatter("{x:g}")
    speed.legend()
    names = [f"{row.mode}\n{row.workers}" for row in rows]
    below = [0.0] * len(rows)
    for part in PARTS:
        values = [getattr(row, part) * 1e3 for row in rows]
        parts.bar(names, values, bottom=below, label=part)
        below = [b + v for b, v in zip(below, values, strict=True)]
    parts.set(ylabel="ms per step", title="breakdown of step time")
    parts.legend()
    return figure
