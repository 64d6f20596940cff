"""Explanations of Spark's own failures: cause and advice first, then Spark's message."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from pybackend.errors import ClusterError
from pybackend.launchers.spark.executors import ask_executors

# Messages of Python, and of PySpark for the packages that it needs.
_NO_MODULE = re.compile(
    r"No module named '([\w.]+)'|\[PACKAGE_NOT_INSTALLED\] (\S+)|"
    r"\[UNSUPPORTED_PACKAGE_VERSION\] (\S+)"
)
_PACKAGES = {"PyArrow": "pyarrow", "Pandas": "pandas"}
# Spark's message has the executor's host after the number of the task.
_HOST = re.compile(r"\(TID \d+\) \((\S+) executor")


def explain_spark_error(error: BaseException, session: Any = None) -> BaseException:
    """Return Spark's own failure as a `ClusterError` that begins with the cause and advice.

    Parameters
    ----------
    session
        Session of the failed job: its executors are asked for their Python if that matters.
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


def find_host(text: str) -> str | None:
    """Return the host of the task in Spark's message."""
    found = _HOST.search(text)
    return found[1] if found else None


def _usual(text: str, lines: list[str]) -> tuple[str, str]:
    advice = "see the executors' logs in the Spark web interface"
    if "PYTHON_VERSION_MISMATCH" in text:
        advice = "set PYSPARK_PYTHON to the same minor version of Python on driver and executors"
    elif "Cannot run program" in text:
        advice = "set PYSPARK_PYTHON to a Python that exists on every executor"
    named = r"(?:: |Caused by: )?[\w.$]*(Error|Exception|Interrupt)\b"
    causes = [line for line in lines if re.match(named, line)]
    return (causes or lines or [text])[-1 if causes else 0], advice


def _missing_module(text: str, session: Any) -> tuple[str, str] | None:
    """Return headline and advice for a module that the executors' Python lacks."""
    found = _NO_MODULE.search(text)
    if found is None:
        return None
    name = next(filter(None, found.groups()))
    package = _PACKAGES.get(name, name.partition(".")[0])
    host, python = _find_python(session, package)
    shown = f"the executors' Python{f' ({python})' if python else ''}"
    host = find_host(text) or host
    place = f" on {host}" if host else ""
    fault = f"too old a version of {package!r}" if found[3] else f"no module {package!r}"
    command = f"{python or 'python'} -m pip install --upgrade {package}"
    return (
        f"{shown}{place} has {fault}",
        f"run `{command}` on every executor's host, or set PYSPARK_PYTHON to a Python that has it. "
        "A module of your own can be sent by addPyFile() or, over Connect, addArtifacts()",
    )


def _find_python(session: Any, package: str) -> tuple[str | None, str | None]:
    """Return host and Python of an executor, if possible one without the package."""
    if session is None:
        return None, None

    # Pickled as code, as it is an inner function: executors may be unable to import this module.
    def look() -> tuple[bool, str, str]:
        import socket
        import sys
        from importlib.util import find_spec

        return find_spec(package) is not None, socket.gethostname(), sys.executable

    with suppress(Exception):
        _, host, python = min(ask_executors(session, look))
        return host, python
    return None, None
