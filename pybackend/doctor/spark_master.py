"""Spark session for one command, started within a time limit and stopped when the command ends."""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from typing import Any, TypeVar

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.net.liveness import within
from pybackend.doctor.machine import find_java

_HOST_PORT = r"(?:[\w.-]+|\[[0-9A-Fa-f:.]+\])"
_MASTERS = (
    r"local(\[(\d+|\*)(\s*,\s*\d+)?\])?",
    r"local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]",
    rf"spark://{_HOST_PORT}:\d+(,{_HOST_PORT}:\d+)*",
    rf"sc://{_HOST_PORT}(:\d+)?(/.*)?",
    r"yarn",
    r"k8s://\S+",
)
_EXAMPLES = (
    "local[2], local-cluster[2,1,1024], spark://host:7077, sc://host:15002 (Spark Connect), yarn "
    "or k8s://https://host:443"
)
_CONNECT_PORT = 15002
_CONNECT_SECONDS = 5.0
# If something other than Spark answers, Spark tries to register with it three times, for 20 s
# each, and a Connect client tries for ten minutes. Other masters may need more time: YARN and
# Kubernetes to allocate resources, a busy machine to start all processes.
_START_SECONDS = 60.0
_PATIENT_SECONDS = 300.0
_EXECUTOR_SECONDS = 60.0
_SETTLED_SECONDS = 2.0
_Value = TypeVar("_Value")


def check_master(master: str) -> str:
    """Return the master URL; `InputError` with examples if Spark accepts no such form."""
    if not any(re.fullmatch(pattern, master) for pattern in _MASTERS):
        raise InputError(f"{master!r} is not a Spark master: expected {_EXAMPLES}")
    return master


@contextmanager
def start_session(master: str, settings: Mapping[str, str]) -> Iterator[Any]:
    """Start a session, and wait for at least one executor if the master has any.

    `ClusterError`: pyspark or Java is missing, the master does not answer, or no executor started.
    """
    check_master(master)
    is_connect = master.startswith("sc://")
    _check_installed(is_connect)
    _check_answers(master)
    limit = _START_SECONDS if master.startswith(("spark:", "sc:")) else _PATIENT_SECONDS
    what = f"Spark did not start at {master}"
    session = _try_within(limit, lambda: _start(master, settings), what)
    try:
        if not is_connect:
            session.sparkContext.setLogLevel("ERROR")
            # PySpark reads this setting only if spark-submit has started it.
            if python := settings.get("spark.pyspark.python"):
                session.sparkContext.pythonExec = python
            if not re.match(r"local(\[|$)", master):
                _await_executors(session, master)
        yield session
    finally:
        with suppress(ClusterError):
            _try_within(_START_SECONDS, session.stop, "Spark did not stop")


def _check_installed(is_connect: bool) -> None:
    # Without grpc_status, Spark Connect's client exits the process with status 0.
    for module in ("pyspark", "grpc_status") if is_connect else ("pyspark",):
        if find_spec(module) is None:
            raise ClusterError(
                f"the Python package {module.replace('_', 'io-')} is not installed: run "
                f"{sys.executable} -m pip install 'tfdist[spark]'"
            )
    if not is_connect and find_java() is None:
        raise ClusterError("no Java was found: install Java 17, or set JAVA_HOME to its folder")


def _check_answers(master: str) -> None:
    """Connect to the master once: Spark would keep trying for minutes and not report the reason."""
    scheme, separator, rest = master.partition("://")
    if not separator or scheme == "k8s":
        return
    reasons = []
    for address in rest.partition("/")[0].split(","):
        host, port = _split(address)
        try:
            socket.create_connection((host, port), _CONNECT_SECONDS).close()
        except OSError as error:
            slow = isinstance(error, TimeoutError)
            reason = f"no answer in {_CONNECT_SECONDS:g} s" if slow else error.strerror or error
            reasons.append(f"{host}:{port}: {reason}")
        else:
            return  # one of several masters leads, and Spark finds out which
    raise ClusterError(
        f"{master} does not answer ({'; '.join(reasons)}): start it there, correct the address, or "
        "open its port in the firewall"
    )


def _split(address: str) -> tuple[str, int]:
    found = re.fullmatch(rf"({_HOST_PORT})(?::(\d+))?", address)
    assert found is not None
    return found[1].strip("[]"), int(found[2] or _CONNECT_PORT)


def _start(master: str, settings: Mapping[str, str]) -> Any:
    from pyspark.sql import SparkSession

    builder: Any = SparkSession.builder
    if master.startswith("sc://"):
        return _connect(builder.remote(master).getOrCreate(), settings)
    for name, value in {**_defaults(master), **settings}.items():
        builder = builder.config(name, value)
    return builder.master(master).getOrCreate()


def _connect(session: Any, settings: Mapping[str, str]) -> Any:
    """Connect a session, and contact its server now rather than at the first request."""
    # Without an answer, the client tries for ten minutes: no attempt is repeated here.
    client = session.client
    has_policies = hasattr(client, "set_retry_policies")  # came with Spark 4
    if has_policies:
        policies = client.get_retry_policies()
        client.set_retry_policies([])
    try:
        _ = session.version
        for name, value in settings.items():
            session.conf.set(name, value)
    except Exception:
        client.close()  # or it would contact the server again when this process exits
        raise
    if has_policies:
        client.set_retry_policies(policies)
    return session


def _defaults(master: str) -> dict[str, str]:
    # This machine may be unable to resolve its own name.
    here = {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}
    # Executors fetch a job's code from each other. They must not wait long for an executor that
    # they cannot reach: the probe reports it.
    impatient = {"connectionTimeout": "5s", "maxRetries": "1", "retryWait": "1s"}
    shuffle = {f"spark.shuffle.io.{name}": value for name, value in impatient.items()}
    return {
        "spark.app.name": "tfdist doctor",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.log.level": "ERROR",
        **(here if master.startswith("local") else shuffle),
    }


def _await_executors(session: Any, master: str) -> None:
    """Wait until one executor has run a task, and then until no more executors are added."""
    what = (
        f"no executor of {master} ran a task: its workers are missing, are busy with other "
        "applications, cannot reach this driver, or have less memory or cores than an executor "
        "requests (--conf spark.executor.memory=..., --conf spark.executor.cores=...)"
    )
    # One stage only: a second stage could wait minutes for an executor behind a firewall.
    _try_within(_EXECUTOR_SECONDS, lambda: session.range(0, 1, 1, 1).collect(), what)
    slots = 0
    deadline = time.monotonic() + _EXECUTOR_SECONDS
    while slots != (slots := session.sparkContext.defaultParallelism):
        if time.monotonic() > deadline:
            return
        threading.Event().wait(_SETTLED_SECONDS)


def _try_within(seconds: float, call: Callable[[], _Value], what: str) -> _Value:
    """Return the value of a call, or raise `ClusterError` with ``what`` and the reason."""
    try:
        return within(seconds, call, ClusterError(f"{what} (no answer in {seconds:g} s)"))
    except ClusterError:
        raise
    except Exception as error:
        raise ClusterError(f"{what} ({_first_line(error)})") from error


def _first_line(error: BaseException) -> str:
    # The message is in the middle of gRPC's errors.
    details = re.search(r'details = "(.+)"', str(error))
    lines = [details[1]] if details else [x for x in str(error).splitlines() if x.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
