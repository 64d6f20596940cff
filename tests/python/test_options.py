"""Options of a training: invalid values and combinations raise an error."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest

from pybackend import DataOptions, Exchange, InputError, LocalSteps


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
        (DataOptions, {"repartition": "no"}, "`repartition` must be True or False"),
        (DataOptions, {"in_memory": "yes"}, "`in_memory` must be True or False"),
        (DataOptions, {"tensors": ["a"]}, "`tensors` must map column names"),
        (DataOptions, {"tensors": {"a": "uint8"}}, "`tensors` of 'a' must be (dtype, shape)"),
        (DataOptions, {"tensors": {"a": ("text", (1,))}}, "`tensors` of 'a' must be (dtype"),
        (DataOptions, {"tensors": {"a": ("str", (1,))}}, "'str' is not a numeric type"),
        (DataOptions, {"tensors": {"a": ("uint8", (0,))}}, "must be positive whole numbers"),
        (DataOptions, {"tensors": {"a": ("uint8", (2.5,))}}, "must be positive whole numbers"),
        (DataOptions, {"tensors": {"a": ("uint8", (3, None))}}, "only the first may be None"),
        (DataOptions, {"tensors": {"a": ("uint8", (True, 2))}}, "must be positive whole"),
        (DataOptions, {"categories": {"a": "red"}}, "`categories` of 'a' must be a list of values"),
        (DataOptions, {"categories": {"a": []}}, "`categories` of 'a' must be distinct values"),
        (DataOptions, {"categories": {"a": [[1], [2]]}}, "`categories` of 'a' must be distinct"),
        (DataOptions, {"categories": {"a": ["x", "x"]}}, "`categories` of 'a' must be distinct"),
        (DataOptions, {"tfrecord_spec": ["a"]}, "`tfrecord_spec` must map feature names"),
        (DataOptions, {"tfrecord_spec": {"a": "int32"}}, "`tfrecord_spec` has the type 'int32'"),
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


def test_shapes_of_r_become_tuples_of_whole_numbers() -> None:
    given: Any = {"a": ["uint8", [28.0, np.int32(28)]], "b": ["int32", [None]], "c": ["int8", 4]}
    given["d"] = ["float32", [None, 3.0]]
    assert DataOptions(tensors=given).tensors == {
        "a": ("uint8", (28, 28)),
        "b": ("int32", (None,)),
        "c": ("int8", (4,)),
        "d": ("float32", (None, 3)),
    }


def test_options_without_entries_are_as_if_not_given() -> None:
    assert DataOptions(tensors={}, categories={}) == DataOptions()


def test_options_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Exchange().transport = "tf"  # type: ignore[misc]
