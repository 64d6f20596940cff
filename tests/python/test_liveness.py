"""A time limit for calls that have none."""

from __future__ import annotations

import threading

import pytest

from pybackend.core.errors import ClusterError
from pybackend.core.net.liveness import within
from pybackend.doctor.spark_master import _try_within


def test_a_value_and_an_error_are_passed_on() -> None:
    assert within(5, lambda: 3, TimeoutError()) == 3
    with pytest.raises(KeyError, match="x"):
        within(5, lambda: {}["x"], TimeoutError())


def test_a_call_that_never_returns_is_left() -> None:
    over = threading.Event()
    with pytest.raises(ClusterError, match="nothing came"):
        within(0.1, over.wait, ClusterError("nothing came"))
    over.set()


def test_what_failed_is_named() -> None:
    over = threading.Event()
    with pytest.raises(ClusterError, match=r"nothing came \(no answer in 0.1 s\)"):
        _try_within(0.1, over.wait, "nothing came")
    with pytest.raises(ClusterError, match=r"it failed \(KeyError: 'x'\)"):
        _try_within(5, lambda: {}["x"], "it failed")
    over.set()
