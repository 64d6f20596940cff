"""Detached jobs on Spark Connect: they outlive the session that submitted them."""

from __future__ import annotations

import os
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_for, worker_processes
from connect import connect_server, new_session
from detaching import (
    SETTINGS,
    assert_same,
    build,
    build_classes,
    drivers,
    make_frame,
    rows,
    slow,
    submit_and_kill,
    train_here,
)

import pybackend
from pybackend import ClusterError, InputError
from pybackend.core.launchers.spark.sessions import REMOTE
from pybackend.types import DetachedJob

pytestmark = [pytest.mark.launcher, pytest.mark.full]
# Not a constant, which a pickled function of this module could contain.
TOKEN = secrets.token_hex(16)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("connect")
    settings = {"spark__connect__authenticate__token": TOKEN}
    with connect_server(folder, **settings) as (found, _), pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        # Without TLS, PySpark sends a token only to this name.
        yield f"sc://localhost:{found.rpartition(':')[2]}/;token={TOKEN}"
    wait_for(lambda: not worker_processes())


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TFDIST_JOBS", str(tmp_path / "jobs"))
    monkeypatch.setenv(REMOTE, url)
    return tmp_path / "jobs"


@pytest.fixture
def session(url: str) -> Iterator[Any]:
    session = new_session(url)
    yield session
    session.stop()


def submit(session: Any, **changes: Any) -> DetachedJob:
    arguments: dict[str, Any] = {"epochs": 2, **SETTINGS, **changes}
    return pybackend.submit_training(session, build, rows(), **arguments)


def find_copy() -> str:
    """Return the address of the copied session, from the environment of the driver."""
    (driver,) = drivers()
    pairs = Path(f"/proc/{driver}/environ").read_bytes().decode().split("\0")
    return next(pair.partition("=")[2] for pair in pairs if pair.startswith(f"{REMOTE}="))


def test_a_dataframe_trains_after_its_session_was_killed(session: Any, folder: Path) -> None:
    name = submit_and_kill("""
        from pyspark.sql import SparkSession
        from detaching import build_classes, make_frame
        session = SparkSession.builder.getOrCreate()
        frame = make_frame(session)
        job = pybackend.submit_training(
            session, build_classes, frame, validation_data=frame.limit(9), epochs=2,
            callbacks=[slow(0.3)], **SETTINGS
        )
        views = [table.name for table in session.catalog.listTables()]
        assert views == ["own_rows"], views
        session.stop()  # its copy stays
    """)
    assert pybackend.attach_job(name).status == "running"
    for path in folder.rglob("*"):
        assert not path.is_file() or TOKEN.encode() not in path.read_bytes(), path
    result = pybackend.attach_job(name).result(240, verbose=0)
    frame = make_frame(session)
    expected = pybackend.barrier_train(
        session, build_classes, frame, validation_data=frame.limit(9), epochs=2, **SETTINGS
    )
    assert_same(result, expected)
    assert len(result.history["val_loss"]) == 2
    wait_for(lambda: not drivers())


def test_arrays_give_the_model_of_this_machine(session: Any) -> None:
    assert_same(submit(session).result(240, verbose=0), train_here())


def test_cancel_leaves_neither_workers_nor_a_session(session: Any, url: str) -> None:
    job = submit(session, epochs=1000, callbacks=[slow(0.05)])
    copy = find_copy()
    wait_for(lambda: any("epoch 1/" in line for line in job.logs()), 120)
    assert job.cancel() == "cancelled"
    wait_for(lambda: not worker_processes() and not drivers())
    # The server never reuses the id of a session that has ended.
    ended = new_session(copy)
    with pytest.raises(Exception, match="SESSION_CLOSED"):
        ended.range(1).collect()
    ended.client.close()
    assert session.range(1).count() == 1


def test_a_driver_that_is_killed_takes_its_workers_along(session: Any) -> None:
    job = submit(session, epochs=1000, callbacks=[slow(0.05)])
    wait_for(lambda: any("epoch 1/" in line for line in job.logs()), 120)
    os.kill(drivers()[0], signal.SIGKILL)
    wait_for(lambda: job.status == "lost")
    wait_for(lambda: not worker_processes())


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({REMOTE: ""}, "set the environment variable SPARK_REMOTE to the URL"),
        ({REMOTE: "{url};user_id=another"}, "does not lead to the server of this session"),
        ({REMOTE: "sc://:1"}, "does not lead to the server of this session"),
        ({"SPARK_LOCAL_REMOTE": "1"}, "this process started its Spark Connect server"),
    ],
)
def test_a_server_that_the_driver_cannot_find_is_named(
    session: Any, url: str, variables: dict[str, str], message: str
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value.format(url=url))
        with pytest.raises(InputError, match=message) as caught:
            submit(session)
    assert TOKEN not in str(caught.value)
    assert pybackend.jobs() == []


def test_too_few_slots_are_named_by_the_call(session: Any) -> None:
    with pytest.raises(ClusterError, match="`workers` is 3"):
        submit(session, workers=3)
    assert pybackend.jobs() == []
