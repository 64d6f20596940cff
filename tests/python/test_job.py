"""The job: its numbers are checked once, with the name in the error, and it is sent as JSON."""

from __future__ import annotations

from dataclasses import FrozenInstanceError
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import MAX_WORKERS
from pybackend.core.job.job import (
    EvaluationJob,
    FunctionJob,
    Job,
    PredictionJob,
    TrainingJob,
    code_classes,
    make_job,
)
from pybackend.core.job.storage_options import ModelOptions
from pybackend.core.job.worker_options import Exchange, LocalSteps

ARGUMENTS: dict[str, Any] = {
    "workers": 2,
    "epochs": 3,
    "batch_size": 32,
    "steps_per_epoch": None,
    "shuffle": True,
    "seed": 1,
    "timeout": 300.0,
    "model_options": ModelOptions(),
    "verbose": 1,
}


@settings(deadline=None)
@given(
    st.builds(
        TrainingJob,
        workers=st.integers(1, MAX_WORKERS),
        epochs=st.integers(1),
        batch_size=st.integers(1),
        steps_per_epoch=st.none() | st.integers(1),
        validation_freq=st.integers(1) | st.lists(st.integers(1), min_size=1).map(tuple),
        shuffle=st.booleans(),
        class_weight=st.none() | st.just(((0, 1.0), (1, 5.0))),
        exchange=st.builds(Exchange, transport=st.sampled_from(["tcp", "tf"]))
        | st.builds(Exchange, bucket_mb=st.sampled_from([1.0, float("inf")]))
        | st.builds(LocalSteps, steps=st.integers(2, 500), momentum=st.floats(0, 0.99)),
        seed=st.integers(0, 2**31 - 1),
        timeout=st.floats(0.001, 1e9),
        model_source=st.sampled_from(["file", "function"]),
        floatx=st.sampled_from(["float16", "float32", "float64"]),
        safe_mode=st.booleans(),
        verbose=st.integers(0, 2),
    )
)
def test_a_job_travels_as_json(job: TrainingJob) -> None:
    assert Job.from_json(job.to_json()) == job


@pytest.mark.parametrize("kind", [FunctionJob, EvaluationJob, PredictionJob, TrainingJob])
def test_a_job_stays_of_its_kind(kind: type[Job]) -> None:
    assert type(Job.from_json(kind(2, roles=(("chief", 1),)).to_json())) is kind
    assert kind(2).kind in ("run", "evaluate", "predict", "train")


def test_a_job_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        FunctionJob(2).workers = 3  # type: ignore[misc]


def test_a_training_job_takes_the_numbers_of_r() -> None:
    job = make_job(
        TrainingJob,
        {**ARGUMENTS, "workers": 2.0, "epochs": 3.0, "steps_per_epoch": 7.0, "seed": np.int32(1)},
    )
    assert job == TrainingJob(
        workers=2,
        epochs=3,
        batch_size=32,
        steps_per_epoch=7,
        seed=1,
        timeout=300.0,
        is_seeded=True,
    )
    assert '"workers": 2,' in job.to_json()


def test_a_training_job_takes_the_epochs_of_r() -> None:
    job = make_job(TrainingJob, {**ARGUMENTS, "initial_epoch": 1.0, "validation_freq": [3.0, 1]})
    assert (job.initial_epoch, job.validation_freq) == (1, (1, 3))
    assert type(job.initial_epoch) is int
    assert make_job(TrainingJob, {**ARGUMENTS, "validation_freq": 2.0}).validation_freq == 2


def test_a_training_job_exchanges_gradients_unless_asked_otherwise() -> None:
    assert make_job(TrainingJob, {**ARGUMENTS, "exchange": None}).exchange == Exchange()
    assert make_job(TrainingJob, {**ARGUMENTS, "exchange": LocalSteps(2)}).exchange == LocalSteps(2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", 0),
        ("workers", MAX_WORKERS + 1),
        ("workers", "two"),
        ("epochs", 0),
        ("initial_epoch", -1),
        ("initial_epoch", 3),
        ("validation_freq", 0),
        ("validation_freq", []),
        ("validation_freq", [1, 0]),
        ("validation_freq", "often"),
        ("exchange", "tcp"),
        ("exchange", Exchange),
        ("batch_size", 0),
        ("batch_size", 1.5),
        ("steps_per_epoch", 0),
        ("steps_per_epoch", "all"),
        ("shuffle", 1),
        ("shuffle", "yes"),
        ("shuffle", None),
        ("seed", -1),
        ("seed", 2**31),
        ("timeout", 0),
        ("model_options", {"safe_mode": True}),
        ("recovery", 3),
        ("verbose", 3),
        ("verbose", -1),
        ("verbose", "loud"),
    ],
)
def test_a_training_job_names_the_wrong_argument(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^`{name}` must be "):
        make_job(TrainingJob, {**ARGUMENTS, name: value})


def test_a_run_job_has_no_training_in_it() -> None:
    assert make_job(FunctionJob, {"workers": 3, "verbose": 0}) == FunctionJob(workers=3, verbose=0)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ({"workers": 0, "verbose": 0}, "workers"),
        ({"workers": 1, "verbose": 7}, "verbose"),
    ],
)
def test_a_run_job_names_the_wrong_argument(arguments: Any, name: str) -> None:
    with pytest.raises(InputError, match=rf"^`{name}` must be "):
        make_job(FunctionJob, arguments)


@pytest.mark.parametrize(("value", "lines"), [(True, 1), (False, 0), ("auto", 1), (2.0, 2)])
def test_verbose_is_also_what_fit_takes(value: Any, lines: int) -> None:
    assert make_job(TrainingJob, {**ARGUMENTS, "verbose": value}).verbose == lines


LEVELS = ["no", "yes", "1"]


@pytest.mark.parametrize(
    ("given", "levels", "codes"),
    [
        ({"yes": 2.0}, LEVELS, ((1, 2.0),)),
        ({"1": 3.0, "no": 0.5}, LEVELS, ((0, 0.5), (2, 3.0))),
        ({1: 3.0}, LEVELS, ((1, 3.0),)),
        ({"0": 3.0}, LEVELS, ((0, 3.0),)),
        ({"2": 3.0, 0: 1.0}, None, ((0, 1.0), (2, 3.0))),
        (None, LEVELS, None),
    ],
)
def test_classes_are_named_by_level_or_code(given: Any, levels: Any, codes: Any) -> None:
    job = make_job(TrainingJob, {"workers": 1, "epochs": 1, "class_weight": given})
    assert code_classes(job, levels).class_weight == codes


@pytest.mark.parametrize(
    ("given", "levels", "message"),
    [
        ({"maybe": 1.0}, LEVELS, "the class 'maybe': use the levels of the label, no, yes, 1"),
        ({"yes": 1.0, 0: 1.0}, LEVELS, "the class 'yes'"),
        ({"yes": 1.0, "Yes": 1.0}, LEVELS, "the class 'Yes': use the levels"),
        ({"yes": 1.0}, None, "the class 'yes': use 0, 1, 2"),
        ({"0": 1.0, 0: 1.0}, None, "has the class 0 twice"),
        ({3: 1.0}, LEVELS, "the class 3: use the levels of the label, no, yes, 1"),
    ],
)
def test_a_class_that_is_none_is_named(given: Any, levels: Any, message: str) -> None:
    job = make_job(TrainingJob, {"workers": 1, "epochs": 1, "class_weight": given})
    with pytest.raises(InputError, match=message):
        code_classes(job, levels)
