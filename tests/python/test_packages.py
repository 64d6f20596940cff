"""Comparison of TensorFlow and Keras on the workers' hosts, from each host's report."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from pybackend.core.machine.packages import TITLES, UNKNOWN, find_difference, read_versions

HERE = read_versions()


def test_this_python_has_both() -> None:
    import keras

    assert HERE["python"] == sys.executable
    assert HERE["keras"] == keras.__version__
    assert HERE["tensorflow"].split(".")[0] == "2"


@pytest.mark.parametrize(
    ("changes", "rank", "parts"),
    [
        ([{}, {}, {}], None, []),
        ([{}, {"tensorflow": "unknown"}], None, []),
        ([{}, {"tensorflow": "2.1.0"}], 1, ["worker 1 on b has TensorFlow 2.1.0, worker 0 on a"]),
        ([{"keras": "3.0.0"}, {}, {}], 0, ["worker 0 on a has Keras 3.0.0, worker 1 on b"]),
        ([{}, {}, {"tensorflow": None}], 2, ["worker 2 on c has no TensorFlow", "-m pip install"]),
        ([{"keras": None}, {"keras": None}], 0, ["no Keras", "pip install keras`"]),
    ],
)
def test_the_worker_that_differs_is_named(
    changes: list[dict[str, Any]], rank: int | None, parts: list[str]
) -> None:
    found = find_difference(["a", "b", "c"], [{**HERE, **change} for change in changes])
    if rank is None:
        assert found is None
        return
    assert found is not None
    assert found[0] == rank
    for part in parts:
        assert part in found[1]


def test_a_worker_that_has_not_joined_differs_from_none() -> None:
    unknown = dict.fromkeys(TITLES, UNKNOWN)
    assert find_difference(["", "b"], [unknown, HERE]) is None
