"""Trained and validated epochs: as in Keras's own fit with the same arguments."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from replicas import Case, check_equal
from test_exact_cases import X, Y, dense

HELD_OUT = X[:30] + 0.5, Y[:30]


def rates() -> Any:
    """A learning rate that depends on the epoch's number."""
    return keras.callbacks.LearningRateScheduler(lambda epoch: 0.2 * 0.5**epoch)


def patience() -> Any:
    """Stops when two validations brought no improvement."""
    return keras.callbacks.EarlyStopping(monitor="val_loss", patience=2, min_delta=10.0)


def case(epochs: int, *callbacks: Any, **settings: Any) -> Case:
    return Case(
        dense(),
        (X, Y),
        epochs=epochs,
        settings=settings,
        callbacks=callbacks,
        validation=HELD_OUT,
    )


CASES = {
    "initial_epoch": case(4, rates(), initial_epoch=2),
    "initial_epoch, shuffle='global'": case(3, initial_epoch=1, shuffle="global"),
    "validation_freq": case(5, validation_freq=2),
    "validation_freq, a list": case(4, validation_freq=(1, 3)),
    "validation_freq, later": case(3, validation_freq=7),
    "both": case(5, rates(), initial_epoch=1, validation_freq=2),
    "both, a list": case(4, initial_epoch=2, validation_freq=(1, 4)),
    "early stopping": case(12, patience(), validation_freq=2),
}
VALIDATED = {
    "initial_epoch": 2,
    "initial_epoch, shuffle='global'": 2,
    "validation_freq": 2,
    "validation_freq, a list": 2,
    "validation_freq, later": 0,
    "both": 2,
    "both, a list": 1,
    "early stopping": 3,
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.full
def test_epochs_are_those_of_keras_fit(name: str, trained: dict[str, Any]) -> None:
    case, found = CASES[name], trained[name]
    _, history = check_equal(case, found, case.callbacks)
    assert len(history.get("val_loss", [])) == VALIDATED[name]
    first = case.settings.get("initial_epoch", 0)
    count = len(history.get("loss", []))
    assert found.epochs == list(range(first + 1, first + 1 + count))
    assert {len(found.history[key]) for key in history if key.startswith("val_")} <= {
        VALIDATED[name]
    }
