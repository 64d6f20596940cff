"""Sessions that do not answer: a real Connect server that stops at different moments."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import build_dense, wait_for, worker_processes
from connect import connect_server, new_session

from pybackend import (
    ClusterError,
    barrier_run,
    barrier_train,
    predict_spark,
    read_tfrecords,
    write_tfrecords,
)
from pybackend.core.launchers import is_session, is_spark_frame
from pybackend.core.launchers.spark import sessions as session_module
from pybackend.core.launchers.spark import spark_jobs as jobs
from pybackend.core.launchers.spark.sessions import is_connect

Server = tuple[str, subprocess.Popen[bytes]]
# Seconds for an answer in these tests, and for the end of a cancelled job.
LIMIT = 4
LONGEST = 90


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("connect")
    with connect_server(folder) as running, pytest.MonkeyPatch.context() as patch:
        # PySpark's functions detect their session by this variable, which would stay set.
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        # The first answers of a new server are slow.
        session = new_session(running[0])
        barrier_run(session, lambda context: 1, workers=1)
        session.stop()
        patch.setattr(session_module, "ANSWER_SECONDS", LIMIT)
        patch.setattr(jobs, "_SILENT_SECONDS", LIMIT)
        patch.setattr(jobs, "_CANCEL_SECONDS", LIMIT)
        patch.setattr(session_module, "_RESTORE_SECONDS", LIMIT)
        yield running


@pytest.fixture
def session(server: Server) -> Iterator[Any]:
    session = new_session(server[0])
    yield session
    session.stop()


class Stop:
    """Stops the server right before the question with a number, counted from 1."""

    def __init__(self, server: Server, number: int) -> None:
        self._process = server[1]
        self._number = number
        self._within = session_module.within
        self.asked = 0

    def __enter__(self) -> Stop:
        session_module.within = self._count
        return self

    def __exit__(self, *_: object) -> None:
        session_module.within = self._within
        self._process.send_signal(signal.SIGCONT)

    def _count(self, *arguments: Any) -> Any:
        self.asked += 1
        if self.asked == self._number:
            self._process.send_signal(signal.SIGSTOP)
        return self._within(*arguments)


def train(session: Any, folder: Path) -> None:
    x = np.zeros((8, 8), "float32")
    barrier_train(session, build_dense, (x, np.zeros(8)), workers=1, verbose=0)


def predict(session: Any, folder: Path) -> None:
    predict_spark(build_dense(), session.range(8).selectExpr(*(f"id AS c{n}" for n in range(8))))


def write(session: Any, folder: Path) -> None:
    write_tfrecords(session.range(8), folder / "data")


def read(session: Any, folder: Path) -> None:
    read_tfrecords(session, folder)


@pytest.mark.full
@pytest.mark.parametrize(
    ("call", "number"),
    [(call, number) for number in (1, 2) for call in (train, predict, write, read)],
)
def test_a_server_that_stops_before_or_after_it_has_answered_ends_the_call(
    server: Server, session: Any, tmp_path: Path, call: Callable[[Any, Path], None], number: int
) -> None:
    began = time.monotonic()
    with Stop(server, number), pytest.raises(ClusterError, match="does not answer") as caught:
        call(session, tmp_path)
    assert time.monotonic() - began < LONGEST
    assert "the Spark Connect server at 127.0.0.1" in str(caught.value)
    assert re.search(r"no reply within \d+ s when asked (for|to) ", str(caught.value))
    assert "start a new session" in str(caught.value)


def problem_of_a_job(session: Any) -> str | None:
    try:
        barrier_run(session, lambda context: context.rank, workers=1, verbose=0)
    except ClusterError as error:
        return str(error)
    return None


@pytest.mark.full
def test_a_server_that_stops_at_any_question_ends_the_call(server: Server, session: Any) -> None:
    number = 1
    while True:
        began = time.monotonic()
        with Stop(server, number) as stop:
            problem = problem_of_a_job(session)
        assert "does not answer" in (problem or "does not answer")
        assert time.monotonic() - began < LONGEST
        if stop.asked < number:
            break
        number += 3  # each takes some seconds
    assert number > 5


def wait_for_ever(session: Any, folder: Path) -> None:
    def work(context: Any) -> None:
        import signal

        (folder / "started").touch()
        signal.pause()

    barrier_run(session, work, workers=1, verbose=0)


@pytest.mark.full
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
def test_a_server_that_is_gone_in_mid_job_ends_the_call(
    server: Server, tmp_path: Path, how: signal.Signals
) -> None:
    """Use this server for the last time: the test ends it."""
    session = new_session(server[0])
    gone: list[float] = []

    def end() -> None:
        wait_for((tmp_path / "started").exists)
        gone.append(time.monotonic())
        server[1].send_signal(how)

    thread = threading.Thread(target=end)
    thread.start()
    try:
        with pytest.raises(ClusterError, match=r"does not answer: .* the state of a job"):
            wait_for_ever(session, tmp_path)
        assert time.monotonic() - gone[0] < LONGEST
        server[1].send_signal(signal.SIGCONT)
        # Only now does the server get the cancellation; a closed client would not send it.
        wait_for(lambda: not worker_processes())
    finally:
        server[1].send_signal(signal.SIGCONT)
        thread.join()
        # Otherwise PySpark would ask the server for minutes when this process ends.
        session.client.close()


def test_the_request_reads_as_a_noun_or_as_a_task() -> None:
    noun = session_module.silence(None, "the model's place", 30)
    task = session_module.silence(None, "to take the model", 30)
    assert "within 30 s when asked for the model's place. " in str(noun)
    assert "within 30 s when asked to take the model. " in str(task)


def test_what_a_session_is() -> None:
    assert not is_session("local")
    assert not is_spark_frame(None)
    assert not is_connect(object())
