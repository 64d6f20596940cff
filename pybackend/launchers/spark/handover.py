"""Hand a Spark Connect session over to a process that outlives this one.

The server copies the session, since the original ends when this process calls ``stop()``.
DataFrames travel as temporary views of the copy.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pybackend.data.dataframe import DataFrameRows
from pybackend.errors import InputError
from pybackend.launchers.base import DataSets
from pybackend.launchers.spark.session import ask, get_session, is_connect
from pybackend.words import term

VARIABLE = "SPARK_REMOTE"
# PySpark sets it when it starts a server itself.
_OWN_SERVER = "SPARK_LOCAL_REMOTE"
# A setting of the copy. Only another client of the same user and server can read it.
_MARK = "spark.tfdist.handover"


def why_not_handed_over(session: Any) -> str | None:
    """Return why no other process can use a session, and what to do instead; None if one can."""
    if not is_connect(session):
        return (
            "a Spark session belongs to the process that started it, and its jobs end with it: run "
            "the script with spark-submit in cluster deploy mode, or use Spark Connect"
        )
    if _OWN_SERVER in os.environ:
        return (
            "this process started its Spark Connect server, which ends with it: connect to a "
            "server that runs independently"
        )
    if not hasattr(session, "cloneSession"):
        return "Spark Connect copies sessions since Spark 4.1: use a newer PySpark and server"
    if not os.environ.get(VARIABLE, "").startswith("sc://"):
        return (
            "a Spark Connect session does not show the address of its server: set the environment "
            f"variable {VARIABLE} to the URL to which you connected, such as sc://host:15002"
        )
    return None


@dataclass(frozen=True)
class CopiedSession:
    """Copy of a session, which another process finds by the address in its environment.

    ``views`` has the name of a temporary view for each set of rows that is a DataFrame.
    """

    views: Mapping[str, str]

    @contextmanager
    def connect(self, datasets: DataSets) -> Iterator[tuple[Any, DataSets]]:
        """Yield the session and the rows of this process, and end the copy after the block."""
        session = get_session()
        try:
            rows = {
                name: replace(data, frame=session.table(self.views[name]))
                if name in self.views
                else data
                for name, data in datasets.items()
            }
            yield session, rows
        finally:
            with suppress(Exception):  # the server may have ended
                ask(session, "to end a session", session.stop)


@dataclass(frozen=True)
class Handover:
    """A copied session, rows without DataFrames, and the environment of the other process.

    The address in ``variables`` may contain a token, so it is never written to a file.
    """

    session: CopiedSession
    datasets: DataSets
    variables: Mapping[str, str]


@contextmanager
def hand_over(session: Any, datasets: DataSets) -> Iterator[Handover]:
    """Copy a session for another process; the copy ends if the block raises an error.

    Raises
    ------
    InputError
        The environment names another server or user than those of the session.
    """
    frames = {k: rows.frame for k, rows in datasets.items() if isinstance(rows, DataFrameRows)}
    views = {name: f"tfdist_{secrets.token_hex(8)}" for name in frames}
    mark = secrets.token_hex(16)
    with ExitStack() as always, ExitStack() as on_error:
        try:
            for name, frame in frames.items():
                create = partial(frame.createTempView, views[name])
                ask(session, f"a view of a {term('DataFrame')}", create)
            copy = ask(session, "a copy of the session", session.cloneSession)
            always.callback(copy.client.close)  # the server's part stays
            on_error.callback(_release, copy)
            ask(copy, "a setting", lambda: copy.conf.set(_MARK, mark))
            for view in views.values():  # the server copies them when they are first looked for
                ask(copy, "its views", partial(copy.catalog.tableExists, view))
        finally:
            for view in views.values():
                with suppress(Exception):
                    ask(session, "to drop a view", partial(session.catalog.dropTempView, view))
        url = _with_session(os.environ[VARIABLE], copy.session_id)
        _check_address(url, mark)
        rest = {k: replace(v, frame=views[k]) if k in views else v for k, v in datasets.items()}
        yield Handover(CopiedSession(views), rest, {VARIABLE: url})
        on_error.pop_all()


def _release(copy: Any) -> None:
    with suppress(Exception):
        ask(copy, "to end a session", copy.client.release_session)


def _with_session(url: str, session_id: str) -> str:
    """Return a URL of Spark Connect that leads to an existing session."""
    server, *pairs = url.split(";")
    others = [pair for pair in pairs if pair and not pair.startswith("session_id=")]
    return ";".join([server.rstrip("/") + "/", *others, f"session_id={session_id}"])


def _check_address(url: str, mark: str) -> None:
    """Check that a URL leads to the session with this mark, and not to another server or user."""
    from pyspark.sql.connect.session import SparkSession

    server = url.partition(";")[0].rstrip("/")  # what follows may have a token
    wrong = InputError(
        f"{VARIABLE} ({server}) does not lead to the server of this session: set it to the URL to "
        "which you connected, with the same user_id and token"
    )
    try:
        other = SparkSession(url)
    except Exception:
        raise wrong from None
    try:
        found = ask(other, "a setting", lambda: other.conf.get(_MARK, None))
    except Exception:
        raise wrong from None
    else:
        if found != mark:
            ask(other, "to end a session", other.stop)
            raise wrong
    finally:
        other.client.close()
