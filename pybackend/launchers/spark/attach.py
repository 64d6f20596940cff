"""Connect PySpark to the Spark application that sparklyr runs.

sparklyr starts a Py4J server inside its own JVM, with a port and a secret; PySpark then uses that
JVM's SparkContext, so that Spark tables and temporary views are available without copying.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from pybackend.errors import ClusterError
from pybackend.launchers.spark.session import ask
from pybackend.words import either

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
