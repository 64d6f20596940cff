"""The HTML of a training's result in notebooks."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

from pybackend.core.api.train_result import TrainResult
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
