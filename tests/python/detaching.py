"""A small training run, and sessions that submit one as a detached job and can be killed.

The sessions import this module. It does not import `conftest`, whose temporary folder would outlive
a session that is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pybackend import barrier_train
from pybackend.types import TrainResult

SETTINGS: dict[str, Any] = {"workers": 2, "batch_size": 8, "seed": 3, "verbose": 0}
HERE = "job = pybackend.submit_training('local', build, rows(), epochs=2, **SETTINGS)"

_SESSION = """
import sys, time, pybackend
sys.path.insert(0, {here!r})
from detaching import SETTINGS, build, rows, slow
print("ready", flush=True)
{submission}
print(job.id, flush=True)
time.sleep(600)
"""


def build() -> Any:
    import keras

    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dropout(0.2)])
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    return model


def build_classes() -> Any:
    import keras

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dropout(0.2)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), loss)
    return model


def make_frame(session: Any) -> Any:
    """Return a Spark DataFrame for `build_classes`: a view of a session."""
    frame = session.range(64).selectExpr("id / 64 AS a", "sin(id) AS b", "int(id % 3) AS label")
    frame.createOrReplaceTempView("own_rows")
    return session.table("own_rows")


def rows() -> Any:
    generator = np.random.default_rng(0)
    return generator.normal(size=(64, 4)), generator.normal(size=(64, 3))


def train_here() -> TrainResult:
    """Return the result of the undisturbed call on this machine."""
    return barrier_train("local", build, rows(), epochs=2, **SETTINGS)


def slow(seconds: float) -> Any:
    """Return a callback that makes each step take at least these seconds."""
    import keras

    class Slow(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            time.sleep(seconds)

    return Slow()


def start_session(
    submission: str = HERE, variables: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    """Start a session that sets ``job`` by some lines of Python, prints its id, and stays."""
    program = _SESSION.format(
        here=str(Path(__file__).parent), submission=textwrap.dedent(submission)
    )
    session = subprocess.Popen(
        [sys.executable, "-c", program],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **(variables or {})},
    )
    assert session.stdout is not None
    assert session.stdout.readline() == "ready\n"
    return session


def end_session(session: subprocess.Popen[str]) -> None:
    """Kill a session with all processes of its group."""
    os.killpg(session.pid, signal.SIGKILL)
    session.communicate()


def submit_and_kill(submission: str, variables: Mapping[str, str] | None = None) -> str:
    """Return the id of a job whose session was killed after it had submitted the job."""
    session = start_session(submission, variables)
    assert session.stdout is not None
    name = session.stdout.readline().strip()
    end_session(session)
    assert name, "the session did not submit a job"
    return name


def drivers() -> list[int]:
    """Return the processes that drive the jobs of this test run."""
    from conftest import marked_processes

    return [pid for pid, words in marked_processes() if b"api.detached_driver" in words]


def assert_same(found: Any, expected: Any) -> None:
    """Check that two results are equal bit by bit."""
    assert found.history == expected.history
    digests = {worker.weights_sha256 for worker in (*found.workers, *expected.workers)}
    assert len(digests) == 1
