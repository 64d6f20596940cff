"""The curves of a history, and their axes."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybackend.core.api.markup import find_ticks
from pybackend.core.api.rendering import Curve, check_smoothing, find_panels
from pybackend.core.errors import InputError


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
