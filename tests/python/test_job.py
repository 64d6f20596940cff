"""The job: its numbers are checked once, by name, and it travels as JSON."""

from __future__ import annotations

import math
from dataclasses import FrozenInstanceError
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pybackend.errors import InputError
from pybackend.job.job import (
    MAX_WORKERS,
    Job,
    positive_seconds,
    run_job,
    train_job,
    whole_number,
)

ARGUMENTS: dict[str, Any] = {
    "workers": 2,
    "epochs": 3,
    "batch_size": 32,
    "steps_per_epoch": None,
    "shuffle": True,
    "seed": 1,
    "timeout": 300.0,
    "safe_mode": True,
    "verbose": 1,
}


@settings(deadline=None)
@given(
    st.builds(
        Job,
        kind=st.sampled_from(["train", "run"]),
        workers=st.integers(1, MAX_WORKERS),
        epochs=st.integers(1),
        batch_size=st.integers(1),
        steps_per_epoch=st.none() | st.integers(1),
        shuffle=st.booleans(),
        seed=st.integers(0, 2**31 - 1),
        timeout=st.floats(0.001, 1e9),
        model_source=st.sampled_from(["file", "function"]),
        floatx=st.sampled_from(["float16", "float32", "float64"]),
        safe_mode=st.booleans(),
        verbose=st.integers(0, 2),
    )
)
def test_a_job_travels_as_json(job: Job) -> None:
    assert Job.from_json(job.to_json()) == job


def test_a_job_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Job("run", 2).workers = 3  # type: ignore[misc]


@settings(deadline=None)
@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
def test_whole_numbers_of_every_type_are_taken_from_the_least_on(value: int, least: int) -> None:
    for same in (value, float(value), np.int64(value), np.float64(value), Fraction(value)):
        if value < least:
            with pytest.raises(InputError, match=rf"`n` must be at least {least}, not "):
                whole_number("n", same, least=least)
        else:
            number = whole_number("n", same, least=least)
            assert (number, type(number)) == (value, int)


@pytest.mark.parametrize(
    "value",
    [None, "3", True, np.True_, 2.5, math.nan, math.inf, -math.inf, 3 + 0j, [3], b"3", 10**400],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_whole_number_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(InputError, match=r"^`epochs` must be a whole number, not "):
        whole_number("epochs", value, least=1)


def test_the_largest_number_is_told() -> None:
    with pytest.raises(InputError, match=r"^`verbose` must be from 0 to 2, not 3$"):
        whole_number("verbose", 3, least=0, most=2)


@settings(deadline=None)
@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_positive_seconds_are_taken(value: float) -> None:
    assert positive_seconds("timeout", value) == value


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, None, "5", 10**400])
def test_other_seconds_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"^`timeout` must be a positive number of seconds"):
        positive_seconds("timeout", value)


def test_a_training_job_takes_the_numbers_of_r() -> None:
    job = train_job(
        {**ARGUMENTS, "workers": 2.0, "epochs": 3.0, "steps_per_epoch": 7.0, "seed": np.int32(1)}
    )
    assert job == Job(
        kind="train", workers=2, epochs=3, batch_size=32, steps_per_epoch=7, seed=1, timeout=300.0
    )
    assert '"workers": 2,' in job.to_json()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("workers", 0),
        ("workers", MAX_WORKERS + 1),
        ("workers", "two"),
        ("epochs", 0),
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
        ("safe_mode", None),
        ("verbose", 3),
        ("verbose", -1),
        ("verbose", True),
    ],
)
def test_a_training_job_names_the_wrong_argument(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=rf"^`{name}` must be "):
        train_job({**ARGUMENTS, name: value})


def test_a_run_job_has_no_training_in_it() -> None:
    assert run_job(3, 0) == Job(kind="run", workers=3, verbose=0)


@pytest.mark.parametrize(
    ("arguments", "name"),
    [((0, 0), "workers"), ((1, 7), "verbose")],
)
def test_a_run_job_names_the_wrong_argument(arguments: Any, name: str) -> None:
    with pytest.raises(InputError, match=rf"^`{name}` must be "):
        run_job(*arguments)
