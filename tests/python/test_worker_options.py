"""Options for the workers: invalid values and combinations raise an error."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from pybackend import Exchange, InputError, LocalSteps


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Exchange, {"transport": "mpi"}, "`transport` must be 'tcp' or 'tf', not 'mpi'"),
        (Exchange, {"compression": "int8"}, "`compression` must be None, 'fp16' or 'bf16', not"),
        (
            Exchange,
            {"transport": "tf", "compression": "fp16"},
            "`compression` needs transport='tcp'",
        ),
        (Exchange, {"encrypt": "yes"}, "`encrypt` must be None, True or False, not 'yes'"),
        (Exchange, {"transport": "tf", "encrypt": True}, "`encrypt=True` needs transport='tcp'"),
        (LocalSteps, {"steps": 2, "encrypt": 1}, "`encrypt` must be None, True or False, not 1"),
        (Exchange, {"loss_over": "batch"}, "`loss_over` must be"),
        (Exchange, {"bucket_mb": -1}, "`bucket_mb` must be a positive number, not -1"),
        (LocalSteps, {"steps": 1}, "`steps` must be at least 2, not 1"),
        (LocalSteps, {"steps": 2.5}, "`steps` must be a whole number, not 2.5"),
        (LocalSteps, {"steps": 2, "learning_rate": 0}, "`learning_rate` must be a positive"),
        (LocalSteps, {"steps": 2, "momentum": 1}, "`momentum` must be a number from 0 to below 1"),
        (LocalSteps, {"steps": 2, "compression": "zip"}, "`compression` must be None, 'fp16'"),
    ],
)
def test_a_wrong_option_is_refused_by_name(kind: Any, options: Any, message: str) -> None:
    with pytest.raises(InputError) as error:
        kind(**options)
    assert message in str(error.value)


def test_numbers_of_r_become_pythons_own() -> None:
    options = LocalSteps(3.0, learning_rate=1, momentum=np.float64(0.5))  # type: ignore[arg-type]
    assert options == LocalSteps(3, 1.0, 0.5)
    assert (type(options.steps), type(options.learning_rate)) == (int, float)
    assert type(options.momentum) is float
    assert Exchange(bucket_mb=math.inf).bucket_mb == math.inf


def test_options_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Exchange().transport = "tf"  # type: ignore[misc]
