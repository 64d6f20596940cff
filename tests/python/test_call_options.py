"""The options of the calls: signatures, help and data are made from one description."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest

import pybackend
from pybackend.core.job.call_options import (
    CALLS,
    CLASSES,
    describe_options,
    list_options,
    read_texts,
)
from pybackend.core.job.job import TrainingJob, make_job


def test_a_training_takes_few_arguments() -> None:
    assert len(inspect.signature(pybackend.barrier_train).parameters) == 24


@pytest.mark.parametrize("call", CALLS)
def test_a_signature_and_its_help_have_each_option(call: str) -> None:
    function = getattr(pybackend, call)
    known = inspect.signature(function).parameters
    texts = read_texts(function.__doc__)
    for name, described in list_options(CALLS[call]).items():
        assert known[name].default == described.option.default
        assert texts[name]
    assert next(iter(known)) == "spark"
    assert all(one.kind is not one.VAR_KEYWORD for one in known.values())


def test_options_are_plain_data() -> None:
    found = json.loads(json.dumps(describe_options()))
    assert set(found["calls"]) == set(CALLS)
    assert set(found["classes"]) == {one.__name__ for one in CLASSES}
    (epochs,) = [one for one in found["calls"]["plan"] if one["name"] == "epochs"]
    assert epochs == {
        "name": "epochs",
        "type": "int",
        "default": 1,
        "least": 1,
        "most": None,
        "optional": False,
        "text": "Passes over the data. Each pass uses each row exactly once.",
    }
    (pause,) = [one for one in found["classes"]["Recovery"] if one["name"] == "timeout"]
    assert (pause["type"], pause["default"]) == ("float", 300.0)
    entries = [*found["calls"].values(), *found["classes"].values()]
    assert all(one["text"] for options in entries for one in options)


def test_an_option_of_a_former_group_is_in_one_object() -> None:
    options: dict[str, Any] = {
        "recovery": pybackend.Recovery("kept", timeout=9),
        "model_options": pybackend.ModelOptions("m.h5", safe_mode=False),
        "exchange": pybackend.Exchange(scale_lr="sqrt"),
    }
    job = make_job(TrainingJob, {"workers": 2, **options})
    assert job.checkpoint == options["recovery"].checkpoint
    assert (job.timeout, job.safe_mode) == (9, False)
    assert job.model_uri == options["model_options"].uri
    assert job.scale_lr == pybackend.ScaleLearningRate("sqrt")
    assert pybackend.Recovery(restarts=3).checkpoint is None
