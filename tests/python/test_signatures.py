"""Signatures, defaults and documentation of the public calls agree."""

from __future__ import annotations

import inspect
import re
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

import pytest

import pybackend
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.storage_options import DataOptions
from pybackend.core.job.worker_options import Exchange, Resources

PUBLIC = {
    name: getattr(pybackend, name)
    for name in pybackend.__all__
    if inspect.isfunction(getattr(pybackend, name)) or is_dataclass(getattr(pybackend, name))
}
DOCUMENTED = {
    name: value for name, value in PUBLIC.items() if "Parameters\n" in (value.__doc__ or "")
}
CALLS = ("barrier_train", "barrier_evaluate", "barrier_predict")


def documented_parameters(value: Any) -> list[str]:
    """Return the names in the section Parameters of a numpy docstring, in order."""
    section = re.split(r"\n(\w+)\n-+\n", inspect.getdoc(value) or "")
    text = dict(zip(section[1::2], section[2::2], strict=True))["Parameters"]
    entries = re.findall(r"^(\S.*)$", text, flags=re.M)
    return [name for entry in entries for name in entry.rstrip(",").split(", ")]


def parameters(value: Any) -> dict[str, Any]:
    """Return defaults by the names of parameters."""
    return {name: p.default for name, p in inspect.signature(value).parameters.items()}


@pytest.mark.parametrize("name", DOCUMENTED)
def test_every_parameter_is_documented_once(name: str) -> None:
    documented = documented_parameters(DOCUMENTED[name])
    assert sorted(documented) == sorted(parameters(DOCUMENTED[name]))


def test_the_calls_and_the_options_are_documented() -> None:
    expected = {*CALLS, "barrier_run", "predict_spark", "train_mnist", "DataOptions"}
    assert {
        *expected,
        "Exchange",
        "LocalSteps",
        "Resources",
        "ScaleLearningRate",
        "read_tfrecords",
    } <= set(DOCUMENTED)


@pytest.mark.parametrize(
    "name",
    ["barrier_train", "DataOptions", "Exchange", "LocalSteps", "Resources", "ScaleLearningRate"],
)
def test_parameters_are_documented_in_their_order(name: str) -> None:
    assert documented_parameters(PUBLIC[name]) == list(parameters(PUBLIC[name]))


@pytest.mark.parametrize("name", CALLS[1:])
def test_calls_share_order_and_defaults(name: str) -> None:
    expected, own = parameters(pybackend.barrier_train), parameters(PUBLIC[name])
    shared = [parameter for parameter in expected if parameter in own]
    assert [parameter for parameter in own if parameter in expected] == shared
    assert {p: own[p] for p in shared} == {p: expected[p] for p in shared}
    assert set(own) - set(expected) <= {"x", "type", "levels", "on_missing", "timeout"}


def test_a_job_has_the_defaults_of_the_call() -> None:
    # Values that a job sets if the call does not.
    settled = {"workers": MISSING, "seed": 0, "exchange": Exchange(), "resources": Resources()}
    settled["roles"] = ()
    options = parameters(DataOptions)
    expected = {**parameters(pybackend.barrier_train), **options, **settled}
    for field in fields(TrainingJob):
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        if field.name in expected:
            assert default == expected[field.name], field.name
