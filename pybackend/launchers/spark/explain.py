"""What a failure of Spark's own says, with the part worth reading first."""

from __future__ import annotations

import re
from contextlib import suppress
from typing import Any

from pybackend.errors import ClusterError
from pybackend.launchers.spark.executors import ask_executors

# Python's own words, and those of PySpark for what it itself needs.
_NO_MODULE = re.compile(
    r"No module named '([\w.]+)'|\[PACKAGE_NOT_INSTALLED\] (\S+)|"
    r"\[UNSUPPORTED_PACKAGE_VERSION\] (\S+)"
)
_PACKAGES = {"PyArrow": "pyarrow", "Pandas": "pandas"}
# Spark names the executor's host beside the number of the task.
_HOST = re.compile(r"\(TID \d+\) \((\S+) executor")


def explain_spark_error(error: BaseException, session: Any = None) -> BaseException:
    """Spark's own failure as a `ClusterError` that begins with the part worth reading.

    Parameters
    ----------
    session
        Of the job that failed: its executors are asked which Python they run, if that matters.
    """
    if not isinstance(error, Exception):
        return error
    text = str(error)
    # Java's frames say nothing about the cause; Python's own last line does.
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("at ")]
    headline, advice = _missing_module(text, session) or _usual(text, lines)
    return ClusterError(
        f"Spark could not run the job: {headline}\n\nWhat to do: {advice}\n\n"
        "Spark's message:\n" + "\n".join(lines)[:3000]
    )


def find_host(text: str) -> str | None:
    """The host of the task of which Spark's message reports."""
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
    """Headline and advice for a module that the executors' Python does not have."""
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
    """Host and Python of an executor, of one without the package if there is one."""
    if session is None:
        return None, None

    # A function inside this one travels as code: executors may not be able to import this module.
    def look() -> tuple[bool, str, str]:
        import socket
        import sys
        from importlib.util import find_spec

        return find_spec(package) is not None, socket.gethostname(), sys.executable

    with suppress(Exception):
        _, host, python = min(ask_executors(session, look))
        return host, python
    return None, None
