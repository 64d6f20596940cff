"""The result of a training as lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pybackend.job.arguments import counted
from pybackend.job.report import Gang, WorkerReport


def list_figures(history: Mapping[str, Sequence[Any]], metrics: Mapping[str, Any]) -> list[str]:
    """Return lines with the metrics of the last epoch, and further metrics."""
    lines = []
    if history:
        last = ", ".join(f"{k} {_figure(v[-1])}" for k, v in history.items() if v)
        lines.append(f"last epoch: {last}")
    if metrics:
        lines.append(", ".join(f"{k} {_figure(v)}" for k, v in metrics.items()))
    return lines


def list_audit(workers: Sequence[WorkerReport]) -> list[str]:
    """Return lines with the result of the audit, if there was one."""
    audit = workers[0].audit if workers else None
    if audit is None:
        return []
    if not audit.steps:
        return [f"not audited: {'; '.join(audit.skipped)}"] if audit.skipped else []
    found = f"largest relative difference {max(audit.weights, audit.metrics):.1g}"
    if audit.differences:
        found = f"{len(audit.differences)} of them different"
    return [f"audited on {audit.steps} of {workers[0].steps:,} steps against one process: {found}"]


def list_workers(workers: Mapping[int, WorkerReport]) -> list[str]:
    """Return a line for each worker, by its number."""
    return [
        f"  worker {number} on {w.host} (pid {w.pid}): {counted(w.rows, 'row')}, "
        f"{counted(w.steps, 'step')}, "
        f"{w.seconds:.1f} s" + ("" if w.waited is None else f", {w.waited:.1f} s of them waiting")
        for number, w in workers.items()
    ]


def list_events(gangs: Sequence[Gang], straggler: tuple[int, float] | None) -> list[str]:
    """Return lines on workers that left or joined, and on the one that the others waited for."""
    lines = []
    for gang in gangs[1:]:
        left = [f"worker {number} left ({why})" for number, why in gang.left.items()]
        joined = [f"worker {number} joined" for number in gang.joined]
        lines.append(f"from epoch {gang.epoch} on: {', '.join([*left, *joined])}")
    if straggler is not None:
        lines.append(f"the others waited {straggler[1]:.1f} s for worker {straggler[0]}")
    return lines


def show_loss(value: float) -> str:
    """Format with four decimals, or four digits if decimals are too few: 0.2912, 2.314e-05."""
    is_shown = not value or 5e-5 <= abs(value) < 1e6
    return f"{value:.4f}" if is_shown else f"{value:.4g}"


def _figure(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
