"""Sessions of another process: sparklyr's JVM, and copies for a process that outlives this one.

sparklyr starts a Py4J server inside its own JVM, with a port and a secret; PySpark then uses that
JVM's SparkContext, so that Spark tables and temporary views are available without copying.

A Spark Connect session is handed over by a copy on the server, since the original ends when this
process calls ``stop()``. DataFrames travel as temporary views of the copy.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

from pybackend.core.data.spark_rows import DataFrameRows
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.launchers.base import DataSets
from pybackend.core.launchers.spark.session import ask, get_session, is_connect
from pybackend.core.words import either, term

_FORGOTTEN = ("pyspark", "pybackend.ml", "pybackend.tfos")


@dataclass(frozen=True)
class _Attached:
    """Session of a JVM, and the modules of PySpark that hold on to that JVM while not in use."""

    session: Any
    modules: dict[str, ModuleType] = field(default_factory=dict)


# By the port of the JVM.
_attached: dict[int, _Attached] = {}
# Port of the JVM whose modules are loaded.
_loaded: int | None = None


def attach_spark(
    port: int, secret: str, spark_home: str | None = None, python: str | None = None
) -> Any:
    """Return the PySpark session of the JVM whose Py4J server listens on a local port.

    Each JVM has its own PySpark modules, so sparklyr may have several connections.

    Parameters
    ----------
    port, secret
        Port and secret of the ``org.apache.spark.api.python.Py4JServer`` in that JVM.
    spark_home
        Spark's folder, if it differs from that of the installed pyspark.
    python
        Python that the executors run; None: the value of PYSPARK_PYTHON.

    Returns
    -------
    pyspark.sql.SparkSession

    Raises
    ------
    ClusterError
        This process started a Spark application itself; pyspark is not installed; or the JVM does
        not answer.
    """
    if importlib.util.find_spec("pyspark") is None:
        raise ClusterError(
            "pyspark is not installed for this Python: install the pyspark version that matches "
            'your Spark, e.g. with install_tfdist(extras = c("cpu", "spark")) in R'
        )
    known = _attached.get(port)
    if known is not None and _is_alive(known.session):
        if _loaded != port:
            _load_pyspark(port, known.modules)
        return known.session
    _reject_foreign_session()
    _load_pyspark(port, {})
    for other in [other for other, one in _attached.items() if not _is_alive(one.session)]:
        del _attached[other]
    _attached[port] = _Attached(_attach(port, secret, spark_home, python))
    return _attached[port].session


def _attach(port: int, secret: str, spark_home: str | None, python: str | None) -> Any:
    from pyspark import SparkConf, SparkContext
    from pyspark.java_gateway import launch_gateway
    from pyspark.sql import SparkSession

    # With these two variables PySpark joins a running JVM instead of starting one.
    variables = {"PYSPARK_GATEWAY_PORT": str(port), "PYSPARK_GATEWAY_SECRET": secret}
    if spark_home:
        variables["SPARK_HOME"] = spark_home
    if python:
        variables["PYSPARK_PYTHON"] = python
    # Set by an earlier Connect session of this process; PySpark would start another one.
    os.environ.pop("SPARK_CONNECT_MODE_ENABLED", None)
    _disconnect_quietly()

    def join() -> Any:
        gateway: Any = launch_gateway()  # type: ignore[no-untyped-call]
        spark = gateway.jvm.org.apache.spark
        context = spark.api.java.JavaSparkContext.fromSparkContext(spark.SparkContext.getOrCreate())
        settings = [
            (pair.productElement(0), pair.productElement(1)) for pair in context.getConf().getAll()
        ]
        conf = SparkConf(loadDefaults=False).setAll(settings)
        SparkContext(gateway=gateway, jsc=context, conf=conf)
        return SparkSession.builder.getOrCreate()

    with _environment(variables):
        return ask(None, "its session", join)


def _is_alive(session: Any) -> bool:
    from py4j.protocol import Py4JError

    # py4j logs the broken connection, which is expected here, as an error.
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        return bool(ask(session, "its name", lambda: session.sparkContext.applicationId))
    except (ClusterError, Py4JError, OSError, AttributeError):  # its JVM exited, or it was stopped
        return False
    finally:
        logging.disable(before)


def _disconnect_quietly() -> None:
    """Hide the traceback that PySpark prints when sparklyr disconnects.

    PySpark's accumulator server reports the end of the JVM as an error, but here it is normal.
    """
    from pyspark import accumulators

    # Its name before pyspark 4, and from then on.
    names = ("AccumulatorServer", "AccumulatorTCPServer")
    server = next(getattr(accumulators, name) for name in names if hasattr(accumulators, name))
    report = server.handle_error

    def handle_error(self: Any, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], (EOFError, OSError)):
            report(self, request, client_address)

    server.handle_error = handle_error


def _reject_foreign_session() -> None:
    from pyspark.sql import SparkSession

    try:
        # Not getActiveSession(): it only returns the session of its own thread.
        session = ask(None, "its session", SparkSession.active)
    except Exception:  # raised for a session whose JVM exited
        return
    if session is None or not _is_alive(session):
        return
    context = session.sparkContext
    if _loaded in _attached and context is _attached[_loaded].session.sparkContext:
        return
    raise ClusterError(
        f"Python started another Spark application ({context.applicationId}, master "
        f"{context.master}), not through sparklyr: pass its session instead, or stop it with its "
        f"{either('stop()', '`$stop()`')}"
    )


def _load_pyspark(port: int, modules: dict[str, ModuleType]) -> None:
    """Replace the loaded modules of PySpark by those of the JVM at a port; empty: load new ones.

    PySpark holds on to the gateway of its first JVM. Objects of a JVM refer to its modules, so they
    never use another JVM. Our modules with classes derived from PySpark's are replaced as well.
    """
    global _loaded
    before = _attached[_loaded].modules if _loaded in _attached else dict[str, ModuleType]()
    for name in list(sys.modules):
        if any(name == one or name.startswith(f"{one}.") for one in _FORGOTTEN):
            before[name] = sys.modules.pop(name)
    sys.modules.update(modules)
    _loaded = port


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set environment variables temporarily: the secret must not reach other processes."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


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
