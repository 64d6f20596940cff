"""Single arguments: numbers of every type are accepted, and an error names a wrong one."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import pybackend
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import (
    check_choice,
    check_flag,
    check_fraction,
    check_positive,
    check_seconds,
    check_whole_number,
)


@settings(deadline=None)
@given(st.integers(-(10**6), 10**6), st.integers(-(10**6), 10**6))
def test_whole_numbers_of_every_type_are_taken_from_the_least_on(value: int, least: int) -> None:
    for same in (value, float(value), np.int64(value), np.float64(value), Fraction(value)):
        if value < least:
            with pytest.raises(InputError, match=rf"`n` must be at least {least}, not "):
                check_whole_number("n", same, least=least)
        else:
            number = check_whole_number("n", same, least=least)
            assert (number, type(number)) == (value, int)


@pytest.mark.parametrize(
    "value",
    [None, "3", True, np.True_, 2.5, math.nan, math.inf, -math.inf, 3 + 0j, [3], b"3", 10**400],
    ids=lambda value: repr(value)[:20],
)
def test_what_is_no_whole_number_is_refused_with_its_name(value: Any) -> None:
    with pytest.raises(InputError, match=r"^`epochs` must be a whole number, not "):
        check_whole_number("epochs", value, least=1)


def test_the_largest_number_is_told() -> None:
    with pytest.raises(InputError, match=r"^`verbose` must be from 0 to 2, not 3$"):
        check_whole_number("verbose", 3, least=0, most=2)


@settings(deadline=None)
@given(st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_positive_seconds_are_taken(value: float) -> None:
    assert check_seconds("timeout", value) == value


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, True, None, "5", 10**400])
def test_other_seconds_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"^`timeout` must be a positive number of seconds"):
        check_seconds("timeout", value)


@pytest.mark.parametrize("value", [1e-9, 3, math.inf, np.float32(0.5)])
def test_positive_numbers_are_taken(value: Any) -> None:
    assert check_positive("n", value) == value


@pytest.mark.parametrize("value", [0, -1, math.nan, True, None, "5"])
def test_other_than_positive_numbers_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"^`n` must be a positive number, not "):
        check_positive("n", value)


@pytest.mark.parametrize("value", [1, 1.5, -0.1, math.nan, False, None, "0"])
def test_other_than_fractions_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"^`n` must be a number from 0 to below 1, not "):
        check_fraction("n", value)
    assert check_fraction("n", 0) == 0


@pytest.mark.parametrize("value", [0, 1, None, "yes", np.True_])
def test_only_true_and_false_are_flags(value: Any) -> None:
    with pytest.raises(InputError, match=r"^`n` must be True or False, not "):
        check_flag("n", value)


@pytest.mark.parametrize("value", [1, "b", None])
def test_other_than_the_choices_are_refused(value: Any) -> None:
    with pytest.raises(InputError, match=r"^`n` must be True or 'a', not "):
        check_choice("n", value, choices=[True, "a"])


@pytest.mark.parametrize(
    ("name", "wrong", "near"),
    [
        ("Exchange", "compresion", "compression"),
        ("LocalSteps", "step", "steps"),
        ("ParameterServer", "server", "servers"),
        ("Elastic", "minimum", "min"),
        ("ScaleLearningRate", "warmup_epoch", "warmup_epochs"),
        ("DataOptions", "category", "categories"),
        ("Recovery", "resumes", "resume"),
        ("Recovery", "folder", "uri"),
        ("Recovery", "checkpoint", "uri"),
        ("Resources", "cpu", "cpus"),
        ("Observer", "on_epoch_ends", "on_epoch_end"),
        ("MedianPruning", "warmup_trial", "warmup_trials"),
        ("SuccessiveHalving", "factors", "factor"),
        ("slurm", "partiton", "partition"),
        ("hosts", "host_file", "hostfile"),
        ("kubernetes", "name_space", "namespace"),
        ("join", "secretfile", "secret_file"),
    ],
)
def test_a_misspelled_argument_names_the_right_one(name: str, wrong: str, near: str) -> None:
    message = rf"^{name}\(\) has no argument `{wrong}`: did you mean `{near}`\?$"
    with pytest.raises(InputError, match=message):
        getattr(pybackend, name)(**{wrong: 1})
    with pytest.raises(InputError, match=r"has no argument `zzz`: see its help"):
        getattr(pybackend, name)(zzz=1)
