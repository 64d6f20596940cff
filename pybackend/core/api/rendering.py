"""A result as text, and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pybackend.core.api.charts import Line, draw_lines
from pybackend.core.api.curves import Panel
from pybackend.core.api.markup import NOTEBOOK
from pybackend.core.job.arguments import counted
from pybackend.core.job.report import Audit, Generation, WorkerReport
from pybackend.core.words import show_value


def list_set(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and texts of the settings that are not None."""
    return [(name, show_value(value)) for name, value in settings.items() if _is_set(value)]


def write_settings(settings: Mapping[str, Any]) -> str:
    """Return a folded table of the settings that are not None."""
    return NOTEBOOK.folded("settings", NOTEBOOK.pairs(list_set(settings)))


def draw_panels(panels: Sequence[Panel]) -> str:
    """Return charts side by side, one for each metric."""
    return NOTEBOOK.charts(map(_draw_panel, panels))


def _draw_panel(panel: Panel) -> str:
    lines = [
        Line(one.label, "validation" if one.is_validation else "training", one.epochs, one.values)
        for one in panel.curves
    ]
    names = [line.name for line in lines] if len(lines) > 1 else []
    return NOTEBOOK.figure(panel.name, draw_lines(f"{panel.name} by epoch", lines), kinds=names)


def _is_set(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else [value]
    return any(one is not None for one in inner)


def list_metrics(history: Mapping[str, Sequence[Any]], metrics: Mapping[str, Any]) -> list[str]:
    """Return lines with the metrics of the last epoch, and further metrics."""
    lines = []
    if history:
        last = ", ".join(f"{k} {show_value(v[-1])}" for k, v in history.items() if v)
        lines.append(f"last epoch: {last}")
    if metrics:
        lines.append(", ".join(f"{k} {show_value(v)}" for k, v in metrics.items()))
    return lines


def list_audit(audit: Audit | None, workers: Sequence[WorkerReport]) -> list[str]:
    """Return lines with the result of the audit."""
    if audit is None:
        return []
    reasons = "; ".join(audit.skipped)
    if not audit.steps:
        return [f"not audited: {reasons}"] if reasons else []
    found = f"largest relative difference {max(audit.weights, audit.metrics):.1g}"
    if audit.differences:
        found = f"{len(audit.differences)} of them different"
    plural = "" if workers[0].steps == 1 else "s"
    steps = f"{audit.steps} of {workers[0].steps:,} step{plural}"
    first = f"audited on {steps} against one process: {found}"
    undecided = "not compared"
    if audit.undecided:
        undecided = f"undecided on {counted(audit.undecided, 'step')}"
    more = [f"  {undecided}: {reasons}"] if reasons else []
    return [first, *more, *(f"  not compared: {name}" for name in audit.left_out)]


def list_workers(workers: Mapping[int, WorkerReport]) -> list[str]:
    """Return a line for each worker, in order of their numbers."""
    return [
        f"  worker {number} on {w.host} (pid {w.pid}): {counted(w.rows, 'row')}, "
        f"{counted(w.steps, 'step')}, "
        f"{w.seconds:.1f} s" + ("" if w.waited is None else f", {w.waited:.1f} s of them waiting")
        for number, w in workers.items()
    ]


def list_events(
    generations: Sequence[Generation], straggler: tuple[int, float] | None
) -> list[str]:
    """Return lines about workers that left or joined, and about the one that held up the others."""
    lines = []
    for generation in generations[1:]:
        left = [f"worker {number} left ({why})" for number, why in generation.left.items()]
        joined = [f"worker {number} joined" for number in generation.joined]
        if generation.joined == generation.workers:
            joined = [f"resumed with {counted(len(joined), 'worker')}"]
        step = f", step {generation.step}" if generation.step > 1 else ""
        lines.append(f"from epoch {generation.epoch}{step} on: {', '.join([*left, *joined])}")
    if straggler is not None:
        lines.append(f"the others waited {straggler[1]:.1f} s for worker {straggler[0]}")
    return lines


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
            str(worker.pid),
            worker.rows,
            worker.steps,
            round(worker.seconds, 2),
            "unknown" if worker.waited is None else round(worker.waited, 2),
        )
        for number, worker in workers.items()
    ]
    return NOTEBOOK.element(
        "div",
        NOTEBOOK.lines(facts),
        draw_panels(panels),
        NOTEBOOK.lines(["", *events]) if events else "",
        NOTEBOOK.table(_HEADS, rows),
        write_settings(settings) if settings else "",
        kind="block",
    )
