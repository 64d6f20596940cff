"""The plot of a training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

import pybackend
from pybackend.core.api.train_result import TrainResult
from pybackend.core.errors import InputError


def result(history: dict[str, list[Any]]) -> TrainResult:
    return TrainResult(b"", "h5", "", history, [], seconds=1.0, seed=0, epochs=2)


def test_one_panel_per_metric_with_training_and_validation() -> None:
    history = {
        "loss": [2.0, 1.0],
        "accuracy": [0.5, 0.75],
        "val_loss": [2.5, 1.5],
        "val_accuracy": [0.25, 0.5],
    }
    figure = result(history).plot()
    assert [axes.get_title() for axes in figure.axes] == ["loss", "accuracy"]
    for axes in figure.axes:
        lines = {line.get_label(): line for line in axes.lines}
        assert list(lines) == ["training", "validation"]
        assert list(lines["training"].get_xdata()) == [1, 2]
        assert list(lines["training"].get_ydata()) == history[axes.get_title()]
        assert list(lines["validation"].get_ydata()) == history[f"val_{axes.get_title()}"]


def test_without_validation_there_is_one_line() -> None:
    figure = result({"loss": [2.0, 1.0]}).plot()
    assert [line.get_label() for line in figure.axes[0].lines] == ["training"]
    assert figure.axes[0].get_legend() is None


def test_the_figure_can_be_written_and_is_a_picture_in_notebooks(tmp_path: Path) -> None:
    figure = result({"loss": [2.0, 1.0]}).plot(tmp_path / "history.svg")
    assert (tmp_path / "history.svg").read_text().startswith("<?xml")
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert pyplot.get_fignums() == []  # or notebooks would show it twice


def test_metrics_are_chosen_and_smoothed() -> None:
    history: dict[str, list[Any]] = {"loss": [4.0, 1.0], "val_loss": [3.0, 2.0], "auc": [0.5, 0.75]}
    figure = result(history).plot(metrics="loss", smooth=0.5)
    (axes,) = figure.axes
    lines = [(line.get_alpha(), list(line.get_ydata())) for line in axes.lines]
    assert lines == [(0.25, [4, 1]), (None, [4, 2]), (0.25, [3, 2]), (None, [3, 7 / 3])]
    named = [text.get_text() for text in axes.get_legend().get_texts()]
    assert named == ["training", "validation"]
    with pytest.raises(InputError, match="`metrics` must be chosen from 'loss', 'auc', not 'mae'"):
        result(history).plot(metrics="mae")


def test_many_metrics_fill_rows_of_three() -> None:
    history: dict[str, list[Any]] = {f"m{n}": [1.0, 2.0] for n in range(5)}
    figure = result(history).plot()
    assert len(figure.axes) == 5
    assert figure.axes[3].get_subplotspec().rowspan.start == 1


def test_without_matplotlib_the_error_says_how_to_get_it() -> None:
    # A new Python without site-packages: the package is really absent.
    program = (
        "from pybackend.core.api.train_result import TrainResult\n"
        "from pybackend.core.errors import InputError\n"
        "try:\n    TrainResult(b'', 'h5', '', {'loss': [1.0]}, [], 1.0, 0, 1).plot()\n"
        "except InputError as error:\n    print(error)\n"
    )
    root = Path(pybackend.__file__).parents[1]
    shown = subprocess.run(
        [sys.executable, "-S", "-c", program],
        env={"PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == "plots need matplotlib: pip install 'tfdist[plots]'\n"


def test_without_history_there_is_nothing_to_plot() -> None:
    with pytest.raises(InputError, match="no epochs were run"):
        result({}).plot()


def test_a_metric_per_class_has_a_line_per_class() -> None:
    figure = result({"f1": [[0.5, 0.25], [0.75, 0.5]]}).plot()
    assert len(figure.axes[0].lines) == 2
