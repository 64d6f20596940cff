"""Recognize Spark sessions, and make short calls to them with a time limit.

A Connect server or a JVM that was stopped, or is behind a failed network, never answers, and
neither Py4J nor the Connect client ever gives up.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from pybackend.errors import ClusterError
from pybackend.net.deadline import within
from pybackend.words import term

ANSWER_SECONDS = 30.0
# A call that carries data has this much more time.
_BYTES_PER_SECOND = 1 << 20
_Value = TypeVar("_Value")


def is_session(value: Any) -> bool:
    """Return whether this is a ``SparkSession``, classic or Connect, without importing pyspark."""
    return _is_a(value, "SparkSession", "pyspark.sql", "pyspark.sql.connect.session")


def get_session(*, starts: bool = True) -> Any:
    """Return the Spark session of this process; if there is none, start one, or return None."""
    from pyspark.sql import SparkSession

    return SparkSession.builder.getOrCreate() if starts else SparkSession.getActiveSession()


def is_spark_frame(value: Any) -> bool:
    """Return whether this is a Spark ``DataFrame``, of either kind, without importing pyspark."""
    return _is_a(value, "DataFrame", "pyspark.sql", "pyspark.sql.connect.dataframe")


def is_connect(session: Any) -> bool:
    """Return whether this is a Spark Connect session."""
    return _is_a(session, "SparkSession", "pyspark.sql.connect.session")


def _is_a(value: Any, name: str, *modules: str) -> bool:
    """Return whether a value is an instance of a class of the modules, without importing them."""
    loaded = [sys.modules[module] for module in modules if module in sys.modules]
    return any(isinstance(value, getattr(module, name, ())) for module in loaded)


def ask(session: Any, request: str, call: Callable[[], _Value], size: int = 0) -> _Value:
    """Return the value of a short call to Spark's driver, which may have stopped responding.

    Parameters
    ----------
    request
        The requested object, as named in error messages; or an action that starts with "to".
    size
        Bytes that are sent with the call; each MB adds a second to the limit.

    Raises
    ------
    ClusterError
        Spark did not answer in time. Errors raised by the call are passed on.
    """
    seconds = ANSWER_SECONDS + size / _BYTES_PER_SECOND
    return within(seconds, call, silence(session, request, seconds))


def silence(session: Any, request: str, seconds: float) -> ClusterError:
    """Return the error that names the silent process, the time, and what to do."""
    if is_connect(session):
        driver, advice = f"the Spark Connect server at {session.client.host}", "see its log"
    else:
        driver, advice = "Spark's driver (its Java process)", "check whether that process runs"
    asked = request if request.startswith("to ") else f"for {request}"
    return ClusterError(
        f"{driver} does not answer: no reply within {seconds:.0f} s when asked {asked}. "
        "It was stopped, is unreachable, or is overloaded: "
        f"{advice}, or start a new session"
    )


def read_version(session: Any) -> tuple[int, ...]:
    """Return the first two numbers of Spark's version; `ClusterError` if it does not answer."""
    version = ask(session, "its version", lambda: session.version)
    return tuple(int(number) for number in version.split(".")[:2])


def read_schema(frame: Any) -> Any:
    """Return the ``StructType`` of a DataFrame; `ClusterError` if the session does not answer."""
    return ask(frame.sparkSession, f"the columns of a {term('DataFrame')}", lambda: frame.schema)
