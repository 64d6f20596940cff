"""Forked workers: they are separate processes, and end as any worker does."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from conftest import FORGE
from warm import Forge

from pybackend import WorkerFailedError, barrier_run
from pybackend.types import WorkerContext


def look(context: WorkerContext) -> Any:
    import __main__

    has_keras = "keras" in sys.modules  # which nothing here imported
    import keras
    import tensorflow as tf

    drawn = [random.random(), np.random.rand(), tf.random.uniform(()), keras.random.uniform(())]
    return has_keras, os.getpid(), *map(float, drawn), __main__.__name__


def test_they_have_what_takes_long_to_import_and_nothing_else_in_common() -> None:
    one, two = barrier_run(None, look, workers=2)
    assert one[0]
    assert two[0]
    assert one[-1] == "__main__"
    assert os.getpid() not in (one[1], two[1])
    for a, b in zip(one[1:-1], two[1:-1], strict=True):
        assert a != b


def end_the_guardian(context: WorkerContext) -> Any:
    for number in (signal.SIGTERM, signal.SIGINT):
        os.kill(os.getppid(), number)
    return os.environ["TFDIST_RANK"], os.environ.get("HDF5_PLUGIN_PATH"), os.getcwd()


def test_signals_to_a_whole_group_leave_the_guardian_and_imports_leave_their_variables() -> None:
    for rank, answer in enumerate(barrier_run(None, end_the_guardian, workers=2)):
        assert answer == (str(rank), "disable", os.getcwd())


@pytest.mark.launcher
def test_the_mark_has_them_start_as_for_users() -> None:
    assert not any(barrier_run(None, lambda context: "keras" in sys.modules, workers=2))


@pytest.mark.full
def test_one_that_starts_while_it_is_hidden_stays_so() -> None:
    forge = Forge()
    try:
        with forge.hidden():
            forge.start()
            assert not forge.path.exists()
        assert forge.path.exists()
        with forge.hidden():
            assert not forge.path.exists()
        assert forge.path.exists()
    finally:
        forge.close()


def test_processes_that_tests_start_fork_their_workers_too_and_belong_to_the_run() -> None:
    code = (
        "from test_warm import *; print([a[0] for a in barrier_run(None, look, workers=2)], "
        "os.environ['TFDIST_TEST_RUN'])"
    )
    here = os.path.dirname(__file__)
    paths = [os.environ["PYTHONPATH"], here, os.path.dirname(os.path.dirname(here))]
    FORGE.start()
    shown = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    ).stdout
    assert shown.splitlines()[-1] == f"[True, True] {os.environ['TFDIST_TEST_RUN']}"


@pytest.mark.parametrize(
    ("end", "message"),
    [
        (lambda context: os._exit(3), "exited with status 3"),
        (lambda context: os.kill(os.getpid(), signal.SIGSEGV), "killed by SIGSEGV"),
    ],
)
def test_their_ends_are_known(end: Any, message: str) -> None:
    with pytest.raises(WorkerFailedError, match=message):
        barrier_run(None, end, workers=2)
