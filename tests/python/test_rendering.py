"""Curves, text and figures of a result."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import pyplot

import pybackend
from pybackend.core.api.markup import find_ticks
from pybackend.core.api.rendering import Curve, check_smoothing, find_panels
from pybackend.core.api.train_result import TrainResult
from pybackend.core.errors import InputError
from pybackend.core.job.report import Generation, WorkerReport

EVIL = "<img src=x onerror=alert(1)>&\"'"


def show(**changes: Any) -> ElementTree.Element:
    """Return the HTML of a result, which must be well-formed."""
    workers = [
        WorkerReport(rank, f"host{rank}", 100 + rank, rows=50, steps=4, seconds=9.0, waited=waited)
        for rank, waited in enumerate([6.0, 0.25])
    ]
    given: dict[str, Any] = {
        "history": {"loss": [2.0, 1.5, 1.0], "val_loss": [2.5, 1.75, 1.25], "auc": [0.5, 0.6, 0.7]},
        "workers": workers,
        "settings": {"batch_size": 8, "elastic": None, "exchange": {"kind": "Exchange"}},
    }
    result = TrainResult(b"", "h5", "", seconds=3.2, seed=7, **{**given, "epochs": 3, **changes})
    return ElementTree.fromstring(result._repr_html_())  # noqa: S314 (our own)


def texts(root: ElementTree.Element, tag: str) -> list[str]:
    return ["".join(one.itertext()) for one in root.iter(tag)]


def places(line: ElementTree.Element) -> list[tuple[float, float]]:
    """Return the points of a curve, which begins with M, each further one with L."""
    numbers = [float(one) for one in str(line.get("d")).replace("M", "").replace("L", "").split()]
    return list(zip(numbers[::2], numbers[1::2], strict=True))


def test_figures_curves_workers_and_settings_are_shown() -> None:
    root = show()
    assert "".join(root.itertext()).startswith("2 workers, 100 rows, 3 epochs, 3.2 s, seed 7")
    lines = list(root.iter("path"))
    assert len(list(root.iter("svg"))) == 2
    assert [line.get("stroke-dasharray") for line in lines] == [None, "5 3", None]
    assert [len(places(line)) for line in lines] == [3, 3, 3]
    assert [line.get("stroke") for line in lines] == ["#3b82c4", "#e0812b", "#3b82c4"]
    assert texts(root, "span") == ["training", "validation"]
    colors = [str(one.get("style")).partition(";")[0] for one in root.iter("span")]
    assert colors == ["color:#3b82c4", "color:#e0812b"]
    cells = texts(root, "td")
    assert cells[:7] == ["0", "host0", "100", "50", "4", "9", "6"]
    assert texts(root, "th")[-2:] == ["batch_size", "exchange"]
    assert cells[-2:] == ["8", "kind Exchange"]
    assert "the others waited 5.8 s for worker 1" in texts(root, "div")


def test_a_falling_loss_falls_on_the_screen() -> None:
    heights = [y for _, y in places(next(show().iter("path")))]
    assert heights == sorted(heights)  # y increases downwards


def test_what_comes_from_users_and_hosts_is_escaped() -> None:
    worker = WorkerReport(0, EVIL, 1)
    root = show(
        history={EVIL: [1.0]},
        epochs=1,
        workers=[worker],
        settings={"launcher": EVIL},
        metrics={EVIL: 1.0},
        generations=[Generation(1, [0]), Generation(2, [0], left={"1": EVIL})],
    )
    assert list(root.iter("img")) == []
    assert texts(root, "td").count(EVIL) == 2
    assert EVIL in texts(root, "h3")


def test_figures_that_are_not_numbers_leave_gaps() -> None:
    root = show(history={"loss": [float("nan"), float("inf"), 1.0]})
    (line,) = root.iter("path")
    assert len(places(line)) == 1
    assert list(show(history={"loss": [float("nan")] * 3}).iter("circle")) == []


def test_without_history_there_are_no_curves() -> None:
    assert list(show(history={}).iter("svg")) == []


def epochs_of(name: str) -> list[int]:
    return [2, 4] if name.startswith("val_") else [1, 2, 3, 4]


HISTORY: dict[str, list[Any]] = {
    "loss": [4.0, 3.0, 2.0, 1.0],
    "f1": [[0.1, 0.2], [0.2, 0.3], [0.3, 0.4], [0.4, 0.5]],
    "val_loss": [3.5, 1.5],
}


def test_a_panel_has_training_and_validation_of_a_metric() -> None:
    loss, f1 = find_panels(HISTORY, epochs_of)
    assert (loss.name, f1.name) == ("loss", "f1")
    assert loss.curves == (
        Curve("training", [1, 2, 3, 4], [4.0, 3.0, 2.0, 1.0]),
        Curve("validation", [2, 4], [3.5, 1.5], is_validation=True),
    )
    assert [curve.label for curve in f1.curves] == ["training 0", "training 1"]
    assert f1.curves[1].values == [0.2, 0.3, 0.4, 0.5]


def test_figures_of_some_epochs_only_are_left_out() -> None:
    panels = find_panels({"loss": [2.0, 1.0, 0.5, 0.1], "extra": [1.0]}, epochs_of)
    assert [panel.name for panel in panels] == ["loss"]


def test_metrics_are_chosen_by_name_and_in_order() -> None:
    assert [panel.name for panel in find_panels(HISTORY, epochs_of, ["f1", "loss"])] == [
        "f1",
        "loss",
    ]
    assert [panel.name for panel in find_panels(HISTORY, epochs_of, "f1")] == ["f1"]
    for wrong in ("auc", ["loss", "val_loss"], []):
        with pytest.raises(InputError, match="`metrics` must be chosen from 'loss', 'f1', not"):
            find_panels(HISTORY, epochs_of, wrong)


def test_a_metric_may_be_of_validation_alone() -> None:
    (panel,) = find_panels({"val_auc": [0.5, 0.6]}, epochs_of)
    assert (panel.name, panel.curves[0].label) == ("auc", "validation")


def test_smoothing_begins_with_the_first_figure() -> None:
    assert Curve("training", [1, 2], [4.0, 1.0]).smoothed(0.5) == [4.0, 2.0]
    assert Curve("training", [1, 2], [4.0, 1.0]).smoothed(0.0) == [4.0, 1.0]
    for wrong in (1, -0.1, "much", float("nan")):
        with pytest.raises(InputError, match="`smooth` must be at least 0 and below 1"):
            check_smoothing(wrong)


finite = st.floats(-1e9, 1e9)


@given(finite, finite)
def test_ticks_are_few_and_hold_all_figures(one: float, other: float) -> None:
    low, high = sorted((one, other))
    ticks = find_ticks(low, high)
    span = ticks[-1] - ticks[0]
    assert 2 <= len(ticks) <= 7
    assert ticks[0] <= low + 1e-6 * span
    assert ticks[-1] >= high - 1e-6 * span
    assert ticks == sorted(set(ticks))


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
    assert pickle.loads(pickle.dumps(figure))._repr_png_().startswith(b"\x89PNG")  # noqa: S301
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
