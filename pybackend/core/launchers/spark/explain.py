"""Spark's own failures, with the most informative part first."""

from __future__ import annotations

import json
import math
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, TypeVar

from pybackend.core.errors import ClusterError, TfdistError
from pybackend.core.launchers.spark.sessions import hold, is_connect, is_one_machine
from pybackend.core.launchers.spark.slots import count_slots
from pybackend.core.launchers.spark.spark_jobs import give_up_after, run_watched
from pybackend.core.words import show

_Value = TypeVar("_Value")
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


@contextmanager
def quiet_log(session: Any) -> Iterator[None]:
    """Silence these loggers in a classic session's JVM, in a thread, because SQL may be slow."""
    if is_connect(session):  # the server has the log
        yield
        return
    # SparkContext sets the level of all loggers and does not return the old one. So log4j is called
    # directly, through SQL that the driver evaluates while planning a query, without running a
    # Spark job. Where SQL cannot do that, the log is unchanged.
    is_silent, is_over = threading.Event(), threading.Event()

    def silence() -> dict[str, str]:
        levels = _levels(session)
        _set_levels(session, dict.fromkeys(levels, "OFF"))
        return levels

    def silence_until() -> None:
        restore = partial(_set_levels, session)
        with suppress(Exception), hold("log", session.sparkContext, silence, restore):
            is_silent.set()
            is_over.wait()
        is_silent.set()  # also where SQL cannot do that

    threading.Thread(target=silence_until, daemon=True).start()
    is_silent.wait(_MOST_SECONDS)  # otherwise a job may fail first on a busy machine
    try:
        yield
    except Exception:
        time.sleep(_LATE_SECONDS)  # here, because a stopped session cannot set levels any more
        raise
    finally:
        is_over.set()


def _levels(session: Any) -> dict[str, str]:
    """Return the loggers to silence, except those already silent, with the levels to restore."""
    # SQL uses the first `getLogger` that Java lists. If that one takes an object, it returns the
    # logger of the class String. Then the levels of these loggers cannot be read, and the root's
    # level is used.
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


_LIMIT_SECONDS = 60.0


def ask_executors(session: Any, look: Callable[[], Any]) -> list[Any]:
    """Return the JSON values of a function that is called in one task per slot.

    A function defined inside another function is pickled as code; any other function needs its
    module on the executors. `ClusterError` if Spark did not answer within a minute. Spark's own
    errors are passed on.
    """
    late = ClusterError(f"no executor answered within {_LIMIT_SECONDS:g} s")
    check = give_up_after(_LIMIT_SECONDS, late)
    texts = run_watched(session, lambda: _ask(session, look), check, idle_seconds=math.inf)
    return [json.loads(text) for text in texts]


def _ask(session: Any, look: Callable[[], Any]) -> list[str]:
    def answer(_: Any) -> str:
        import json

        return json.dumps(look())

    count = count_slots(session)
    if not is_connect(session):
        return list(session.sparkContext.parallelize(range(count), count).map(answer).collect())
    from pyspark.sql.functions import udf

    numbers = session.range(0, count, 1, count)
    # With Arrow, executors would need pyarrow.
    rows = numbers.select(udf(answer, "string", useArrow=False)("id")).collect()
    return [row[0] for row in rows]


# Messages of Python, and of PySpark for the packages that it needs.
_NO_MODULE = re.compile(
    r"No module named '([\w.]+)'|\[PACKAGE_NOT_INSTALLED\] (\S+)|"
    r"\[UNSUPPORTED_PACKAGE_VERSION\] (\S+)"
)
_PACKAGES = {"PyArrow": "pyarrow", "Pandas": "pandas"}
SEE_LOGS = "see the executors' logs in the Spark web interface"
_ADVICE = {
    "PYTHON_VERSION_MISMATCH": "set PYSPARK_PYTHON to the same minor version of Python on driver "
    "and executors",
    "Cannot run program": "set PYSPARK_PYTHON to a Python that exists on every executor",
}
# Spark's message has the executor's host after the number of the task.
_HOST = re.compile(r"\(TID \d+\) \((\S+) executor")


def explain_spark_error(error: BaseException, session: Any = None) -> BaseException:
    """Return Spark's own failure as a `ClusterError` that begins with the cause and advice.

    The executors of ``session`` are queried for their Python if that matters.
    """
    if not isinstance(error, Exception):
        return error
    text = str(error)
    # Java's frames do not show the cause; the last line of Python's traceback does.
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("at ")]
    headline, advice = _missing_module(text, session) or _usual(text, lines)
    return ClusterError(
        f"Spark could not run the job: {headline}\n\nWhat to do: {advice}\n\n"
        "Spark's message:\n" + "\n".join(lines)[:3000]
    )


def run_explained(session: Any, call: Callable[[], _Value], **limits: Any) -> _Value:
    """Return the value of a call that runs a Spark job, as `run_watched` does.

    Spark's own failure is raised as an explained `ClusterError`; errors of tfdist that the call
    raises are passed on.
    """

    def attempt() -> _Value | Exception:
        try:
            return call()
        except Exception as error:
            return error

    with quiet_log(session):
        found = run_watched(session, attempt, **limits)
    if isinstance(found, TfdistError):
        raise found
    if isinstance(found, Exception):
        # Its frames are Java's, and the message contains their text.
        raise explain_spark_error(found, session) from None
    return found


def _usual(text: str, lines: list[str]) -> tuple[str, str]:
    advice = next((advice for found, advice in _ADVICE.items() if found in text), SEE_LOGS)
    named = r"(?:: |Caused by: )?[\w.$]*(Error|Exception|Interrupt)\b"
    causes = [line for line in lines if re.match(named, line)]
    return (causes or lines or [text])[-1 if causes else 0], advice


def _missing_module(text: str, session: Any) -> tuple[str, str] | None:
    """Return a headline and advice for a module that the executors' Python lacks."""
    if (found := _NO_MODULE.search(text)) is None:
        return None
    name = next(filter(None, found.groups()))
    package = _PACKAGES.get(name, name.partition(".")[0])
    host, python, is_there = _find_python(session, package)
    if is_there and not found[3]:
        return _explain_other_python(text, session, package, python)
    shown = f"the executors' Python{f' ({python})' if python else ''}"
    if known := _HOST.search(text):
        host = known[1]
    where = f" on {host}" if host else ""
    fault = f"too old a version of {show(package)}" if found[3] else f"no module {show(package)}"
    command = f"{python or 'python'} -m pip install --upgrade {package}"
    return f"{shown}{where} has {fault}", (
        f"run `{command}` on every executor's host, or set PYSPARK_PYTHON to a Python that has "
        "it. Send your own modules with addPyFile() or, over Connect, addArtifacts()"
    )


def _explain_other_python(
    text: str, session: Any, package: str, python: str | None
) -> tuple[str, str]:
    """Explain a Python UDF that runs in another Python than the workers: it is set when defined."""
    # As `driver_python` chooses the workers' Python only in place of this one.
    is_default = not is_connect(session) and is_one_machine(session)
    other = shutil.which("python3") if is_default else None
    host = _HOST.search(text)
    return (
        f"the Python of the table's Python UDFs{f' ({other})' if other else ''}"
        f"{f' on {host[1]}' if host else ''} has no module {show(package)}",
        f"set PYSPARK_PYTHON={python}, which has it, or the setting spark.pyspark.python, before "
        "the session starts",
    )


def _find_python(session: Any, package: str) -> tuple[str | None, str | None, bool]:
    """Return the host and Python of an executor, and whether it has the package.

    If there is an executor that lacks the package, it is that one.
    """

    # Pickled as code, as it is an inner function: executors may be unable to import this module.
    def look() -> tuple[bool, str, str]:
        import socket
        import sys
        from importlib.util import find_spec

        return find_spec(package) is not None, socket.gethostname(), sys.executable

    with suppress(Exception):  # also without a session
        is_there, host, python = min(ask_executors(session, look))
        return host, python, is_there
    return None, None, False
