"""Spark sessions: recognize them, ask them with a time limit, and prepare them for tasks.

A Connect server or a JVM that was stopped, or is behind a failed network, never answers, and
neither Py4J nor the Connect client ever gives up.

A Connect session is handed over to a process that outlives this one by a copy on the server, since
the original ends when this process calls ``stop()``. DataFrames travel as temporary views of the
copy.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pybackend.core.data.spark_rows import DataFrameRows
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.launchers.base import DataSets
from pybackend.core.launchers.package_files import pack_package
from pybackend.core.net.liveness import within
from pybackend.core.words import term

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
    return _is_a(session, "SparkSession", "pyspark.sql.connect.session")


def _is_a(value: Any, name: str, *modules: str) -> bool:
    loaded = [sys.modules[module] for module in modules if module in sys.modules]
    return any(isinstance(value, getattr(module, name, ())) for module in loaded)


def owner_of(session: Any) -> Any:
    """Return the SparkContext, which several classic sessions share, or the Connect session."""
    return session if is_connect(session) else session.sparkContext


def ask(session: Any, request: str, call: Callable[[], _Value], size: int = 0) -> _Value:
    """Return the value of a short call to Spark's driver, which may have stopped responding.

    Error messages name ``request``: an object, or an action that starts with "to". Each MB of
    ``size``, in bytes, which are sent with the call, adds a second to the limit. `ClusterError` if
    Spark did not answer in time. Errors raised by the call are passed on.
    """
    seconds = ANSWER_SECONDS + size / _BYTES_PER_SECOND
    return within(seconds, call, silence(session, request, seconds))


def silence(session: Any, request: str, seconds: float) -> ClusterError:
    driver, advice = "Spark's driver (its Java process)", "check whether that process runs"
    if is_connect(session):
        driver, advice = f"the Spark Connect server at {session.client.host}", "see its log"
    asked = request if request.startswith("to ") else f"for {request}"
    return ClusterError(
        f"{driver} does not answer: no reply within {seconds:.0f} s when asked {asked}. It was "
        f"stopped, is unreachable, or is overloaded: {advice}, or start a new session"
    )


def read_version(session: Any) -> tuple[int, ...]:
    """Return the first two numbers of Spark's version; `ClusterError` if it does not answer."""
    version = ask(session, "its version", lambda: session.version)
    return tuple(map(int, version.split(".")[:2]))


def read_schema(frame: Any) -> Any:
    """Return the ``StructType`` of a DataFrame; `ClusterError` if the session does not answer."""
    return ask(frame.sparkSession, f"the columns of a {term('DataFrame')}", lambda: frame.schema)


def number_partitions(session: Any, count: int) -> Any:
    """Return a DataFrame with this number of partitions, each of one row with its number."""
    return ask(session, "a plan", lambda: session.range(0, count, 1, count))


def map_in_arrow(frame: Any, task: Any, schema: Any, size: int = 0, **options: Any) -> Any:
    """Return the lazy DataFrame of what a task yields; ``size`` is as in `ask`."""
    plan = partial(frame.mapInArrow, task, schema, **options)
    return ask(frame.sparkSession, "a plan", plan, size)


def is_one_machine(session: Any) -> bool:
    """Return whether all workers run on the Spark driver's machine, so that loopback suffices."""
    return read_master(session).startswith("local")


def read_setting(session: Any, name: str) -> str | None:
    """Return a setting of the session or its context; None if it is unset or hidden."""
    if is_connect(session):
        return ask(session, f"the setting {name}", partial(_shown_setting, session, name))
    # Cached: the settings of a SparkContext are fixed, and reading takes 30 ms.
    known: dict[str, dict[str, str]] = vars(session.sparkContext)
    if "tfdist_settings" not in known:
        pairs = ask(session, "its settings", lambda: session.sparkContext.getConf().getAll())
        known["tfdist_settings"] = dict(pairs)
    return known["tfdist_settings"].get(name)


def _shown_setting(session: Any, name: str) -> str | None:
    with suppress(Exception):  # Connect does not show all settings
        if (value := session.conf.get(name, None)) is not None:
            return str(value)
    return None


def read_master(session: Any) -> str:
    """Return the address of the cluster's manager, or the kind of local session."""
    if is_connect(session):
        return read_setting(session, "spark.master") or "unknown"
    return str(session.sparkContext.master)


# `addPyFile` clears Python's cache of archives, which fails in two threads at once.
SHIPPING = threading.Lock()


def shipped_to(session: Any) -> set[str]:
    """Return the names of the files that were sent to a session's executors."""
    names: set[str] = vars(owner_of(session)).setdefault("tfdist_shipped", set())
    return names


def send_file(
    session: Any, request: str, size: int, write: Callable[[Path], str], *, is_package: bool = False
) -> None:
    """Send a file to the executors, which import from it if it ``is_package``.

    ``request`` is as in `ask`. ``write`` writes or links the file into a folder, and returns its
    path.
    """
    if is_connect(session):
        kind = {"pyfile" if is_package else "file": True}
        with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
            path = write(Path(folder))
            ask(session, request, lambda: session.addArtifacts(path, **kind), size)
        return
    from pyspark import SparkFiles

    # Executors fetch it at any time while the context lives: so it is in the folder that Spark
    # removes with the context.
    path = write(Path(ask(session, "its folder for files", SparkFiles.getRootDirectory)))
    context = session.sparkContext
    add = context.addPyFile if is_package else context.addFile
    ask(session, request, lambda: add(path), size)


def ship_package(session: Any) -> None:
    """Make ``import pybackend`` on the executors load the driver's version."""
    archive = pack_package()
    name = f"pybackend-{hashlib.sha256(archive).hexdigest()[:16]}.zip"

    def write(folder: Path) -> str:
        path = folder / "tfdist" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(archive)
        return str(path)

    with SHIPPING:
        shipped = shipped_to(session)
        if name not in shipped:
            request = "to take this package's archive"
            send_file(session, request, len(archive), write, is_package=True)
            shipped.add(name)


_Before = TypeVar("_Before")


@contextmanager
def driver_python(session: Any) -> Iterator[None]:
    """On a single machine, run the workers with the driver's Python, unless another was chosen."""
    if is_connect(session) or not is_one_machine(session):
        yield
        return
    context = session.sparkContext

    def choose() -> str:
        before = str(context.pythonExec)
        if before == "python3":
            context.pythonExec = sys.executable
        return before

    def restore(before: str) -> None:
        context.pythonExec = before

    with hold("python", context, choose, restore):
        yield


@dataclass
class _Change:
    """The previous value, alone in a list while the change is made; and the calls that need it."""

    before: list[Any] = field(default_factory=list)
    users: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


_changes: dict[tuple[str, int], _Change] = {}
_lock = threading.Lock()


@contextmanager
def hold(
    name: str, owner: object, change: Callable[[], _Before], restore: Callable[[_Before], None]
) -> Iterator[None]:
    """Make a change for the first of several concurrent calls, and undo it after the last.

    ``owner`` is the object that the change with this name affects, and must live as long as the
    block. ``change`` returns the previous value, which ``restore`` receives.
    """
    key = name, id(owner)
    with _lock:
        held = _changes.setdefault(key, _Change())
        held.users += 1
    try:
        with held.lock:
            held.before = held.before or [change()]
        yield
    finally:
        with held.lock:
            with _lock:
                held.users -= 1
                is_last = not held.users
            if is_last and held.before:
                restore(held.before.pop())
            with _lock:
                if not held.users:
                    _changes.pop(key, None)


_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
# Stored in the session, since several Python objects may represent it: the previous value, and the
# number of calls that need the change.
_USE = "spark.tfdist.rowsAtOnce"
_ROWS_AT_ONCE = 2000
_RESTORE_SECONDS = 10.0


@contextmanager
def small_batches(session: Any) -> Iterator[None]:
    """Reduce how many rows Spark passes to a task at a time: 10,000 wide rows need a lot of memory.

    The first of several calls changes the setting, and the last one restores it.
    """
    lock = vars(owner_of(session)).setdefault("tfdist_lock", threading.Lock())
    with lock:
        ask(session, "a change of settings", lambda: _lower(session.conf))
    try:
        yield
    finally:
        with lock, suppress(Exception):  # a stopped session needs no settings
            within(_RESTORE_SECONDS, lambda: _restore(session.conf), ClusterError())


def _lower(conf: Any) -> None:
    use = conf.get(_USE, None)
    before, users = json.loads(use) if use else (conf.get(_RECORDS, None), 0)
    conf.set(_USE, json.dumps([before, users + 1]))
    if not users:
        known = int(before or 0)  # 0 or less: no limit
        conf.set(_RECORDS, str(min(known, _ROWS_AT_ONCE) if known > 0 else _ROWS_AT_ONCE))


def _restore(conf: Any) -> None:
    before, users = json.loads(conf.get(_USE))
    if users > 1:
        conf.set(_USE, json.dumps([before, users - 1]))
        return
    conf.unset(_RECORDS)
    if before is not None:
        conf.set(_RECORDS, before)
    conf.unset(_USE)


REMOTE = "SPARK_REMOTE"
# PySpark sets it when it starts a server itself.
_OWN_SERVER = "SPARK_LOCAL_REMOTE"
# A setting of the copy. Only another client of the same user and server can read it.
_HANDOVER = "spark.tfdist.handover"


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
    if not os.environ.get(REMOTE, "").startswith("sc://"):
        return (
            "a Spark Connect session does not show the address of its server: set the environment "
            f"variable {REMOTE} to the URL to which you connected, such as sc://host:15002"
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
            frames = {name: session.table(view) for name, view in self.views.items()}
            yield session, _with_frames(datasets, frames)
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

    `InputError` if the environment names another server or user than those of the session.
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
            ask(copy, "a setting", lambda: copy.conf.set(_HANDOVER, mark))
            for view in views.values():  # the server copies them when they are first looked for
                ask(copy, "its views", partial(copy.catalog.tableExists, view))
        finally:
            for view in views.values():
                with suppress(Exception):
                    ask(session, "to drop a view", partial(session.catalog.dropTempView, view))
        url = _with_session(os.environ[REMOTE], copy.session_id)
        _check_address(url, mark)
        yield Handover(CopiedSession(views), _with_frames(datasets, views), {REMOTE: url})
        on_error.pop_all()


def _with_frames(datasets: DataSets, frames: Mapping[str, Any]) -> DataSets:
    return {k: replace(v, frame=frames[k]) if k in frames else v for k, v in datasets.items()}


def _release(copy: Any) -> None:
    with suppress(Exception):
        ask(copy, "to end a session", copy.client.release_session)


def _with_session(url: str, session_id: str) -> str:
    server, *pairs = url.split(";")
    others = [pair for pair in pairs if pair and not pair.startswith("session_id=")]
    return ";".join([server.rstrip("/") + "/", *others, f"session_id={session_id}"])


def _check_address(url: str, mark: str) -> None:
    """Check that a URL leads to the session with this mark, and not to another server or user."""
    from pyspark.sql.connect.session import SparkSession

    server = url.partition(";")[0].rstrip("/")  # what follows may have a token
    wrong = InputError(
        f"{REMOTE} ({server}) does not lead to the server of this session: set it to the URL to "
        "which you connected, with the same user_id and token"
    )
    with ExitStack() as stack:
        try:
            other = SparkSession(url)
            stack.callback(other.client.close)
            found = ask(other, "a setting", lambda: other.conf.get(_HANDOVER, None))
        except Exception:
            raise wrong from None
        if found != mark:
            ask(other, "to end a session", other.stop)
            raise wrong
