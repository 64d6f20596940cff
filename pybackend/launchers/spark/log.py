"""Spark's own log on the driver's terminal: without the stack of a failure that we explain."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

from pybackend.launchers.spark.session import is_connect

# They write the stack of a task that failed: the first in local mode, the second always.
_LOGGERS = ("org.apache.spark.executor.Executor", "org.apache.spark.scheduler.TaskSetManager")
_LOG4J = "org.apache.logging.log4j"
# Instead of INFO: Spark's default, which a filter hides as long as no level is set for the logger
# itself. To set INFO would show a line for each task of every later job; who has called
# setLogLevel("INFO") loses these two loggers' lines. Nor can a level be inherited again: SQL can
# pass no null, and the loggers keep the level, whatever setLogLevel() says later.
_HIDDEN, _SHOWN = "INFO", "WARN"
# For which a job waits: a query of a new session takes seconds, and later ones hardly any time.
_MOST_SECONDS = 10.0
# For the lines of tasks that Spark kills after one has failed.
_LATE_SECONDS = 1.0
# Jobs that need silence, and the levels to return to after the last one.
_jobs = 0
_before: dict[str, str] = {}
_lock = threading.Lock()


@contextmanager
def quiet_log(session: Any) -> Iterator[None]:
    """Silence these loggers of a classic session's JVM, on a thread: SQL may take its time there.

    SparkContext sets the level of everything, and does not say what it was. So log4j itself is
    called, by SQL that the driver evaluates while it plans a query: no Spark job is run. Where SQL
    may not do that, the log stays as it is.
    """
    if is_connect(session):  # the log is the server's
        yield
        return
    is_silent, is_over = threading.Event(), threading.Event()
    arguments = (session, is_silent, is_over)
    threading.Thread(target=_silence_until, args=arguments, daemon=True).start()
    is_silent.wait(_MOST_SECONDS)  # else a job may fail first, on a busy machine
    try:
        yield
    except Exception:
        time.sleep(_LATE_SECONDS)  # here: once the session is stopped, no level can be set any more
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
    """Loggers to silence, with the level to return to; the user may have silenced one already.

    SQL takes the first `getLogger` that Java lists. If that is the one of an object, it is asked
    for the logger of the class of texts: then these loggers' levels cannot be read, and the root's
    is used.
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
