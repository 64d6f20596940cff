"""The history of a training as a figure (needs matplotlib: the extra ``plots``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pybackend.errors import InputError


def plot_history(
    history: Mapping[str, Sequence[Any]], epochs_of: Callable[[str], Sequence[int]]
) -> Any:
    """One panel per metric over its epochs, training and validation together.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    InputError
        matplotlib is missing.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InputError("plots need matplotlib: pip install 'tfdist[plots]'") from error
    names = [name for name in history if not name.startswith("val_")]
    figure = Figure(figsize=(5 * len(names), 3.5), layout="constrained")
    for place, name in enumerate(names, start=1):
        axes = figure.add_subplot(1, len(names), place)
        for key, label in ((name, "training"), (f"val_{name}", "validation")):
            if key in history:
                axes.plot(epochs_of(key), history[key], marker="o", label=label)
        axes.set_xlabel("epoch")
        axes.set_title(name)
        axes.legend()
    return figure
