"""A result as text, as HTML for notebooks, and as a figure; matplotlib is only imported to draw."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

from pybackend.core.api.markup import NOTEBOOK, Line, draw_lines
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import as_number, counted
from pybackend.core.job.report import Generation, WorkerReport
from pybackend.core.words import show_value

TrainResult = Any  # which imports this module
_VALIDATION = "val_"
_KINDS = (".png", ".pdf", ".svg")
_COLUMNS = 3
_WIDTH, _HEIGHT = 4.6, 3.2
# With more epochs, markers would overlap.
_MARKED = 30
_HEADS = ("worker", "host", "process", "rows", "steps", "seconds", "waiting, s")


@dataclass(frozen=True)
class Curve:
    """Values of one metric per epoch, for the training or the validation rows.

    Attributes
    ----------
    label
        ``"training"`` or ``"validation"``, with a number if the metric has several values.
    """

    label: str
    epochs: list[int]
    values: list[float]
    is_validation: bool = False

    def smoothed(self, weight: float) -> list[float]:
        """Return exponential moving averages, where ``weight`` is the decay factor of older values.

        The weights always sum to 1, as in TensorBoard, so the first mean is the first value.
        """
        mean, total, found = 0.0, 0.0, []
        for value in self.values:
            mean = weight * mean + (1 - weight) * value
            total = weight * total + (1 - weight)
            found.append(mean / total)
        return found


@dataclass(frozen=True)
class Panel:
    """The curves of one metric."""

    name: str
    curves: tuple[Curve, ...]


def find_panels(
    history: Mapping[str, Sequence[Any]],
    epochs_of: Callable[[str], Sequence[int]],
    metrics: str | Sequence[str] | None = None,
) -> list[Panel]:
    """Return a panel for each metric that has values, with training and validation together.

    ``metrics`` are those to show, in this order, without ``val_``; None: all. An unknown one raises
    an `InputError`.
    """
    names = list(dict.fromkeys(name.removeprefix(_VALIDATION) for name in history))
    wanted = [metrics] if isinstance(metrics, str) else metrics
    if wanted is not None:
        wanted = list(wanted)
        unknown = [name for name in wanted if name not in names]
        if unknown or not wanted:
            raise InputError(
                f"`metrics` must be chosen from {', '.join(map(repr, names))}, not {metrics!r}"
            )
    panels = []
    for name in wanted or names:
        keys = [key for key in (name, _VALIDATION + name) if history.get(key)]
        curves = [curve for key in keys for curve in _cut(history[key], list(epochs_of(key)), key)]
        if curves:
            panels.append(Panel(name, tuple(curves)))
    return panels


def _cut(series: Sequence[Any], epochs: list[int], key: str) -> Iterator[Curve]:
    """Yield one curve, or one for each of a metric's several values."""
    # A callback may add values in only some epochs: the history does not record which ones.
    if len(series) != len(epochs):
        return
    is_validation = key.startswith(_VALIDATION)
    label = "validation" if is_validation else "training"
    if not isinstance(series[0], Sequence):
        yield Curve(label, epochs, [float(value) for value in series], is_validation)
        return
    for number in range(len(series[0])):
        values = [float(value[number]) for value in series]
        yield Curve(f"{label} {number}", epochs, values, is_validation)


def summarize(result: TrainResult) -> list[str]:
    """Return lines with the metrics of the last epoch, and with what each worker did."""
    workers = [
        f"  worker {number} on {w.host} (pid {w.pid}): {counted(w.rows, 'row')}, "
        f"{counted(w.steps, 'step')}, "
        f"{w.seconds:.1f} s" + ("" if w.waited is None else f", {w.waited:.1f} s of them waiting")
        for number, w in _number_workers(result).items()
    ]
    return [*_list_facts(result), *workers, *_list_events(result)]


def show_in_notebook(result: TrainResult) -> str:
    """Return self-contained HTML: facts, curves, events, workers and settings."""
    events, rows = _list_events(result), []
    for number, one in _number_workers(result).items():
        waited = "unknown" if one.waited is None else round(one.waited, 2)
        seconds = round(one.seconds, 2)
        rows.append((number, one.host, str(one.pid), one.rows, one.steps, seconds, waited))
    return NOTEBOOK.element(
        "div",
        NOTEBOOK.lines(_list_facts(result)),
        NOTEBOOK.charts(map(_draw_panel, find_panels(result.history, result.epochs_of))),
        NOTEBOOK.lines(["", *events]) if events else "",
        NOTEBOOK.table(_HEADS, rows),
        write_settings(result.settings) if result.settings else "",
        kind="block",
    )


def list_set(settings: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return names and texts of the settings that are not None."""
    found = []
    for name, value in settings.items():
        inner = value.values() if isinstance(value, Mapping) else [value]
        if any(one is not None for one in inner):
            found.append((name, show_value(value)))
    return found


def write_settings(settings: Mapping[str, Any]) -> str:
    """Return a folded table of the settings that are not None."""
    return NOTEBOOK.folded("settings", NOTEBOOK.pairs(list_set(settings)))


def _draw_panel(panel: Panel) -> str:
    lines = [
        Line(one.label, "validation" if one.is_validation else "training", one.epochs, one.values)
        for one in panel.curves
    ]
    names = [line.name for line in lines] if len(lines) > 1 else []
    return NOTEBOOK.figure(panel.name, draw_lines(f"{panel.name} by epoch", lines), kinds=names)


def _number_workers(result: TrainResult) -> dict[int, WorkerReport]:
    return {_number(result, worker.rank): worker for worker in result.workers}


def _number(result: TrainResult, rank: int) -> int:
    """Return the number of a worker: its rank, unless ranks have changed since it started."""
    return result.generations[-1].workers[rank] if len(result.generations) > 1 else rank


def _list_facts(result: TrainResult) -> list[str]:
    rows = sum(worker.rows for worker in result.workers)
    lines = [
        f"{counted(len(result.workers), 'worker')}, {counted(rows, 'row')}, "
        f"{counted(result.epochs, 'epoch')}, {result.seconds:.1f} s, seed {result.seed}"
    ]
    if result.history:
        last = ", ".join(f"{k} {show_value(v[-1])}" for k, v in result.history.items() if v)
        lines.append(f"last epoch: {last}")
    if result.metrics:
        lines.append(", ".join(f"{k} {show_value(v)}" for k, v in result.metrics.items()))
    return [*lines, *_list_audit(result)]


def _list_audit(result: TrainResult) -> list[str]:
    audit, taken = result.audit, result.workers[0].steps
    if audit is None:
        return []
    reasons = "; ".join(audit.skipped)
    if not audit.steps:
        return [f"not audited: {reasons}"] if reasons else []
    found = f"largest relative difference {max(audit.weights, audit.metrics):.1g}"
    if audit.differences:
        found = f"{len(audit.differences)} of them different"
    steps = f"{audit.steps} of {taken:,} step{'' if taken == 1 else 's'}"
    unsure = f"undecided on {counted(audit.undecided, 'step')}" if audit.undecided else ""
    return [
        f"audited on {steps} against one process: {found}",
        *([f"  {unsure or 'not compared'}: {reasons}"] if reasons else []),
        *(f"  not compared: {name}" for name in audit.left_out),
    ]


def _list_events(result: TrainResult) -> list[str]:
    """Return lines about workers that left or joined, and about the one that held up the others."""
    lines = [_describe_change(generation) for generation in result.generations[1:]]
    if result.straggler is not None:
        rank, seconds = result.straggler
        lines.append(f"the others waited {seconds:.1f} s for worker {_number(result, rank)}")
    return lines


def _describe_change(generation: Generation) -> str:
    left = [f"worker {number} left ({why})" for number, why in generation.left.items()]
    joined = [f"worker {number} joined" for number in generation.joined]
    if generation.joined == generation.workers:
        joined = [f"resumed with {counted(len(joined), 'worker')}"]
    step = f", step {generation.step}" if generation.step > 1 else ""
    return f"from epoch {generation.epoch}{step} on: {', '.join([*left, *joined])}"


def check_figure(path: str | os.PathLike[str] | None) -> None:
    """Check that a figure can be drawn, and written to this path; None: it is only shown.

    A missing matplotlib, and a type of file that is not supported, raise an `InputError`.
    """
    if find_spec("matplotlib") is None:
        raise InputError("plots need matplotlib: pip install 'tfdist[plots]'")
    if path is not None and os.path.splitext(path)[1].lower() not in _KINDS:
        raise InputError(f"name the figure's file *.png, *.pdf or *.svg, not {os.fspath(path)!r}")


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a matplotlib figure; create its folder if needed."""
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise InputError(f"{os.fspath(path)} cannot be written: {error}") from error


def check_smoothing(smooth: Any) -> float:
    weight = as_number(smooth)
    if weight is None or not 0 <= weight < 1:
        raise InputError(f"`smooth` must be at least 0 and below 1, e.g. 0.6, not {smooth!r}")
    return weight


def __getattr__(name: str) -> Any:
    if name == "HistoryFigure":  # as pickle looks it up: figures are sent to other processes
        return _figure_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@cache
def _figure_class() -> Any:
    from matplotlib.figure import Figure

    class HistoryFigure(Figure):
        # Notebooks show it by this method. Pyplot would show it twice, and hold it in memory until
        # it is closed.
        def _repr_png_(self) -> bytes:
            file = io.BytesIO()
            self.savefig(file, format="png", dpi=self.dpi)
            return file.getvalue()

    HistoryFigure.__qualname__ = HistoryFigure.__name__
    return HistoryFigure


def plot_panels(panels: Sequence[Panel], smooth: float) -> Any:
    """Plot a grid of panels with their curves, which are smoothed if ``smooth`` is not 0."""
    from matplotlib.ticker import MaxNLocator

    columns = min(len(panels), _COLUMNS)
    rows = -(-len(panels) // columns)
    figure = _figure_class()(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    for index, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, index)
        for number, curve in enumerate(panel.curves):
            _draw_curve(axes, curve, f"C{number}", smooth)
        axes.set_title(panel.name)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if len(panel.curves) > 1:
            axes.legend(frameon=False)
    return figure


def _draw_curve(axes: Any, curve: Curve, color: str, smooth: float) -> None:
    marker = "o" if len(curve.epochs) <= _MARKED else None
    line = "--" if curve.is_validation else "-"
    style: dict[str, Any] = {"color": color, "linestyle": line, "markersize": 4}
    if smooth:
        axes.plot(curve.epochs, curve.values, **style, alpha=0.25, label="_values")
        axes.plot(curve.epochs, curve.smoothed(smooth), **style, label=curve.label)
    else:
        axes.plot(curve.epochs, curve.values, **style, marker=marker, label=curve.label)
