"""The result of a training as HTML, for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pybackend.api.curves import Panel
from pybackend.api.curves_svg import draw_panels
from pybackend.api.markup import (
    write_block,
    write_folded,
    write_lines,
    write_settings,
    write_table,
)
from pybackend.job.report import WorkerReport

_HEADS = ("worker", "host", "process", "rows", "steps", "seconds", "waiting, s")


def describe_training(
    facts: Sequence[str],
    events: Sequence[str],
    panels: Sequence[Panel],
    workers: Mapping[int, WorkerReport],
    settings: Mapping[str, Any],
) -> str:
    """Return self-contained HTML.

    Parameters
    ----------
    facts, events
        Lines above and below the curves.
    workers
        Reports by the number of the worker.
    """
    rows = [
        (
            number,
            worker.host,
            worker.pid,
            worker.rows,
            worker.steps,
            round(worker.seconds, 2),
            "unknown" if worker.waited is None else round(worker.waited, 2),
        )
        for number, worker in workers.items()
    ]
    parts = [
        write_lines(facts),
        draw_panels(panels) if panels else "",
        write_lines(["", *events]) if events else "",
        write_table(_HEADS, rows),
        write_folded("settings", write_settings(settings)) if settings else "",
    ]
    return write_block(*parts)
