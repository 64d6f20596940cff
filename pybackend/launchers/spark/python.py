"""The Python that Spark's tasks run, and the copy of this package sent to it."""

from __future__ import annotations

import hashlib
import io
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

from pybackend.launchers.package_files import package_files, read_sources
from pybackend.launchers.spark.session import ask, is_connect
from pybackend.launchers.spark.slots import is_one_machine

# Fixed, so that the archive depends only on its content: Spark rejects a second file with the same
# name and other bytes.
_STAMP = (1980, 1, 1, 0, 0, 0)


# `addPyFile` clears Python's cache of archives, which fails in two threads at once.
SHIPPING = threading.Lock()


def shipped_to(session: Any) -> set[str]:
    """Return the names of the files that were sent to a session's executors."""
    owner = session if is_connect(session) else session.sparkContext
    names: set[str] = vars(owner).setdefault("tfdist_shipped", set())
    return names


def ship_package(session: Any) -> None:
    """Make ``import pybackend`` on the executors load the driver's version."""
    archive = _pack_package(_digest(read_sources()))
    name = f"pybackend-{hashlib.sha256(archive).hexdigest()[:16]}.zip"
    request = "to take this package's archive"
    if is_connect(session):
        with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
            path = Path(folder) / name
            path.write_bytes(archive)
            ask(
                session, request, lambda: session.addArtifacts(str(path), pyfile=True), len(archive)
            )
        return
    from pyspark import SparkFiles

    # Executors fetch it at any time while the context lives: so it is in the folder that Spark
    # removes with the context.
    with SHIPPING:
        shipped = shipped_to(session)
        if name in shipped:
            return
        root = ask(session, "its folder for files", SparkFiles.getRootDirectory)
        path = Path(root) / "tfdist" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(archive)
        ask(session, request, lambda: session.sparkContext.addPyFile(str(path)), len(archive))
        shipped.add(name)


def _digest(sources: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sources.items():
        digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()


@lru_cache(maxsize=1)  # equal code may be compiled to different bytes
def _pack_package(digest: str) -> bytes:
    """Return the archive of the sources with this digest."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zipped:
        for name, content in package_files().items():
            zipped.writestr(zipfile.ZipInfo(name, _STAMP), content)
    return archive.getvalue()


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
class _Change(Generic[_Before]):
    """Previous value, and the number of calls that need the change."""

    before: _Before
    users: int = 0


_changes: dict[tuple[str, int], _Change[object]] = {}
_lock = threading.Lock()


@contextmanager
def hold(
    name: str, owner: object, change: Callable[[], _Before], restore: Callable[[_Before], None]
) -> Iterator[None]:
    """Make a change for the first of several concurrent calls, and undo it after the last.

    Parameters
    ----------
    name, owner
        Name of the change, and the object that it affects, which must live as long as the block.
    change
        Makes the change without delay, because other calls are waiting. Returns the previous value.
    restore
        Receives the previous value.
    """
    key = name, id(owner)
    with _lock:
        if key not in _changes:
            _changes[key] = _Change(change())
        _changes[key].users += 1
    try:
        yield
    finally:
        with _lock:
            held = _changes[key]
            held.users -= 1
            if not held.users:
                restore(_changes.pop(key).before)  # type: ignore[arg-type]
