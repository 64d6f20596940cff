"""What a Spark session is, and short questions to it, each with a limit in time.

A Connect server or a JVM that was stopped, or is behind a network that has failed, never answers,
and neither Py4J nor Connect's client gives up by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

from pybackend.errors import ClusterError
from pybackend.net.deadline import within

ANSWER_SECONDS = 30.0
# What travels with a question has so much longer for each byte.
_BYTES_PER_SECOND = 1 << 20
_Value = TypeVar("_Value")


def is_session(value: Any) -> bool:
    """Whether this is a ``SparkSession``, classic or Connect; imports nothing."""
    return _is_a(value, "SparkSession", "pyspark.sql", "pyspark.sql.connect.session")


def get_session(*, starts: bool = True) -> Any:
    """The Spark session of this process; if there is none, one is started, or it is None."""
    from pyspark.sql import SparkSession

    return SparkSession.builder.getOrCreate() if starts else SparkSession.getActiveSession()


def is_spark_frame(value: Any) -> bool:
    """Whether this is a Spark ``DataFrame``, classic or Connect; imports nothing."""
    return _is_a(value, "DataFrame", "pyspark.sql", "pyspark.sql.connect.dataframe")


def is_connect(session: Any) -> bool:
    """Whether this is a Spark Connect session."""
    return _is_a(session, "SparkSession", "pyspark.sql.connect.session")


def _is_a(value: Any, name: str, *modules: str) -> bool:
    """Whether a value is of a class of modules that are loaded: else there is no such value."""
    loaded = [sys.modules[module] for module in modules if module in sys.modules]
    return any(isinstance(value, getattr(module, name, ())) for module in loaded)


def ask(session: Any, request: str, call: Callable[[], _Value], size: int = 0) -> _Value:
    """The value of a short call to Spark's driver, which may be gone.

    Parameters
    ----------
    request
        What is asked for, as error messages name it; or what to do, if it begins with "to".
    size
        Bytes that travel with the call; for each MB it may last a second longer.

    Raises
    ------
    ClusterError
        No answer in time. What the call itself raises is passed on.
    """
    seconds = ANSWER_SECONDS + size / _BYTES_PER_SECOND
    return within(seconds, call, silence(session, request, seconds))


def silence(session: Any, request: str, seconds: float) -> ClusterError:
    """The error that names who has not answered, for how long, and what to do."""
    if is_connect(session):
        driver, advice = f"the Spark Connect server at {session.client.host}", "see its log"
    else:
        driver, advice = "Spark's driver (its Java process)", "see whether that process runs"
    asked = request if request.startswith("to ") else f"for {request}"
    return ClusterError(
        f"{driver} does not answer: nothing came within {seconds:.0f} s when asked {asked}. "
        "It was stopped, is out of reach, or is overloaded: "
        f"{advice}, or start a new session"
    )


def read_schema(frame: Any) -> Any:
    """The ``StructType`` of a DataFrame; `ClusterError` if the session does not answer."""
    return ask(frame.sparkSession, "the columns of a DataFrame", lambda: frame.schema)
