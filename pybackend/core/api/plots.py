"""Plot the history of a training run; this imports matplotlib, from the extra ``plots``."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pybackend.core.api.curves import Curve, Panel

_COLUMNS = 3
_WIDTH, _HEIGHT = 4.6, 3.2
# With more epochs, markers would overlap.
_MARKED = 30


class HistoryFigure(Figure):
    """A matplotlib figure that notebooks show without pyplot.

    Pyplot would show it twice, and hold it in memory until it is closed.
    """

    def _repr_png_(self) -> bytes:
        file = io.BytesIO()
        self.savefig(file, format="png", dpi=self.dpi)
        return file.getvalue()


def plot_panels(panels: Sequence[Panel], smooth: float) -> Any:
    """Plot a grid of panels with their curves, which are smoothed if ``smooth`` is not 0."""
    columns = min(len(panels), _COLUMNS)
    rows = -(-len(panels) // columns)
    figure = HistoryFigure(figsize=(_WIDTH * columns, _HEIGHT * rows), layout="constrained")
    for place, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(rows, columns, place)
        for number, curve in enumerate(panel.curves):
            _draw(axes, curve, f"C{number}", smooth)
        axes.set_title(panel.name)
        axes.set_xlabel("epoch")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        if len(panel.curves) > 1:
            axes.legend(frameon=False)
    return figure


def _draw(axes: Any, curve: Curve, color: str, smooth: float) -> None:
    marker = "o" if len(curve.epochs) <= _MARKED else None
    line = "--" if curve.is_validation else "-"
    style: dict[str, Any] = {"color": color, "linestyle": line, "markersize": 4}
    if smooth:
        axes.plot(curve.epochs, curve.values, **style, alpha=0.25, label="_values")
        axes.plot(curve.epochs, curve.smoothed(smooth), **style, label=curve.label)
    else:
        axes.plot(curve.epochs, curve.values, **style, marker=marker, label=curve.label)
