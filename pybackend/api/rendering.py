"""A result as text and as HTML; all text from users or hosts is escaped.

Styles are inline and use the page's own text colour, because notebooks may be light or dark, and
some remove style sheets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from pybackend.api.curves import Panel, draw_panels
from pybackend.job.arguments import counted
from pybackend.job.report import Audit, Generation, WorkerReport

_LINE = "border-bottom:1px solid rgba(128,128,128,0.35)"
_CELL = f"padding:2px 12px 2px 0;{_LINE};color:inherit"


def write_table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """Return a table with right-aligned numbers."""
    first = "".join(f'<th style="{_CELL};text-align:left">{escape(head)}</th>' for head in heads)
    lines = "".join(f"<tr>{''.join(map(_write_cell, row))}</tr>" for row in rows)
    return (
        '<table style="border-collapse:collapse;background:none;color:inherit;font-size:0.92em">'
        f"<thead><tr>{first}</tr></thead><tbody>{lines}</tbody></table>"
    )


def write_folded(title: str, inside: str) -> str:
    """Return content that is hidden until its title is clicked."""
    return (
        '<details style="margin:6px 0"><summary style="cursor:pointer">'
        f"{escape(title)}</summary>{inside}</details>"
    )


def write_settings(settings: Mapping[str, Any]) -> str:
    """Return a table of the settings that are not None."""
    rows = [(name, _show(value)) for name, value in settings.items() if _is_set(value)]
    return write_table(("setting", "value"), rows)


def write_text(text: str) -> str:
    """Return a document with its own line breaks."""
    return (
        '<pre style="color:inherit;background:rgba(128,128,128,0.12);padding:8px;overflow:auto;'
        f'max-height:28em;font-size:0.88em">{escape(text)}</pre>'
    )


def write_lines(lines: Sequence[str]) -> str:
    """Return lines of text, the first in bold."""
    return "".join(
        f'<div style="{"font-weight:600" if number == 0 else "opacity:0.85"}">{escape(line)}</div>'
        for number, line in enumerate(lines)
    )


def write_block(*parts: str) -> str:
    """Return the parts as one block, for a cell of a notebook."""
    return f'<div style="color:inherit;max-width:60em">{"".join(parts)}</div>'


def list_settings(settings: Mapping[str, Any]) -> list[str]:
    """Return the settings that are not None as lines of text."""
    return [f"{name}: {_show(value)}" for name, value in settings.items() if _is_set(value)]


def _write_cell(value: Any) -> str:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    side = "right" if is_number else "left"
    return f'<td style="{_CELL};text-align:{side}">{escape(_show(value))}</td>'


def _is_set(value: Any) -> bool:
    inner = value.values() if isinstance(value, Mapping) else [value]
    return any(one is not None for one in inner)


def _show(value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_show(one)}" for name, one in value.items() if one is not None)
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, int):
        return f"{value}"
    return str(value)


def list_metrics(history: Mapping[str, Sequence[Any]], metrics: Mapping[str, Any]) -> list[str]:
    """Return lines with the metrics of the last epoch, and further metrics."""
    lines = []
    if history:
        last = ", ".join(f"{k} {_figure(v[-1])}" for k, v in history.items() if v)
        lines.append(f"last epoch: {last}")
    if metrics:
        lines.append(", ".join(f"{k} {_figure(v)}" for k, v in metrics.items()))
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


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)


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
