"""Spark's log on the driver's terminal, without stack traces of failures that we explain."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pybackend.launchers.spark.session import is_connect

# They print the stack trace of a failed task: the first in local mode, the second always.
_LOGGERS = ("org.apache.spark.executor.Executor", "org.apache.spark.scheduler.TaskSetManager")
_LOG4J = "org.apache.logging.log4j"
# Level to restore instead of INFO, Spark's default, which a filter hides while the logger has no
# level of its own. Setting INFO would print a line for each task of every later job; after
# setLogLevel("INFO"), the lines of these two loggers are lost. A level cannot become inherited
# again, because SQL cannot pass null; the loggers ignore later calls of setLogLevel().
_HIDDEN, _SHOWN = "INFO", "WARN"
# Longest wait of a job: the first query of a session takes seconds, later ones are fast.
_MOST_SECONDS = 10.0
# Wait for the lines of tasks that Spark kills after a failure.
_LATE_SECONDS = 1.0
# Number of jobs that need silence, and the levels to restore after the last one.
_jobs = 0
_before: dict[str, str] = {}
_lock = threading.Lock()


@contextmanager
def quiet_log(session: Any) -> Iterator[None]:
    """Silence these loggers of a classic session's JVM, on a thread, because SQL may be slow.

    SparkContext sets the level of all loggers and does not return the old one. So log4j is called
    directly, by SQL that the driver evaluates while it plans a query: no Spark job is run. Where
    SQL cannot do that, the log is unchanged.
    """
    if is_connect(session):  # the server has the log
        yield
        return
    is_silent, is_over = threading.Event(), threading.Event()
    arguments = (session, is_silent, is_over)
    threading.Thread(target=_silence_until, args=arguments, daemon=True).start()
    is_silent.wait(_MOST_SECONDS)  # otherwise a job may fail first on a busy machine
    try:
        yield
    except Exception:
        time.sleep(_LATE_SECONDS)  # here, because a stopped session cannot set levels any more
        raise
    finally:
        is_over.set()


def _silence_until(session: Any, is_silent: threading.Event, is_over: threading.Event) -> None:
    with suppress(Exception):
        _begin(session)
    is_silent.set()
    is_over.wait()
    with suppress(Exception):
        _end(session)


def _begin(session: Any) -> None:
    global _jobs
    with _lock:
        _jobs += 1
        if not _before:
            _before.update(_levels(session))
            _set_levels(session, dict.fromkeys(_before, "OFF"))


def _end(session: Any) -> None:
    global _jobs
    with _lock:
        _jobs -= 1
        if not _jobs:
            levels = dict(_before)
            _before.clear()
            _set_levels(session, levels)


def _levels(session: Any) -> dict[str, str]:
    """Return the loggers to silence with the levels to restore, without those already silent.

    SQL uses the first `getLogger` that Java lists. If that one takes an object, it returns the
    logger of the class String: then the levels of these loggers cannot be read, and the root's
    level is used.
    """
    manager = f"'{_LOG4J}.LogManager'"
    names = [f"{manager}, 'getLogger', '{name}'" for name in _LOGGERS]
    root, *loggers = (
        text.split(" ")[0].rpartition(":")
        for text in _evaluate(session, [f"{manager}, 'getRootLogger'", *names])
    )
    levels = {}
    for wanted, (name, _, level) in zip(_LOGGERS, loggers, strict=True):
        level = level if name == wanted else root[2]
        if level.isalpha() and level != "OFF":
            levels[wanted] = _SHOWN if level == _HIDDEN else level
    return levels


def _set_levels(session: Any, levels: dict[str, str]) -> None:
    configurator = f"'{_LOG4J}.core.config.Configurator', 'setLevel'"
    if levels:
        _evaluate(session, [f"{configurator}, '{n}', '{level}'" for n, level in levels.items()])


def _evaluate(session: Any, calls: Iterable[str]) -> list[str]:
    columns = ", ".join(f"reflect({call})" for call in calls)
    query = f"SELECT {columns} FROM VALUES (1) AS one(x)"  # noqa: S608 (constants of this module)
    (row,) = session.sql(query).collect()
    return list(row)
