"""The environment of a job's workers on an executor: found, or read and unpacked once per host.

This file is imported on the executors; the driver sends it there.
"""

from __future__ import annotations

import fcntl
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pybackend
from pybackend.errors import ClusterError
from pybackend.launchers.environment.archive import PackedEnvironment
from pybackend.launchers.environment.installing import Interpreter, install_here, read_blocks
from pybackend.net.greeting import RejectedError
from pybackend.net.rendezvous import connect
from pybackend.net.stream import Stream

# Folders that Spark removes with the application, in Spark's own order: those of a standalone
# cluster and of YARN are shared by the executors of a host, the last is the executor's.
_FOLDERS = (("SPARK_EXECUTOR_DIRS", os.pathsep), ("LOCAL_DIRS", ","), ("SPARK_LOCAL_DIRS", ","))


SCHEMA = "problem string, is_unreached boolean"
# Spark unpacks files whose names end like that of a tar file, on each executor.
FILE = "{}.gz"
# Purpose of the connections over which the driver sends it.
PURPOSE = "environment"
_CONNECT_SECONDS = 10.0
_PAUSE_SECONDS = 0.5
# For a block: a host may be slow to unpack, or the driver may be stopped for a while.
BLOCK_SECONDS = 120.0
_BLOCK = 256 << 10


class UnreachedError(ClusterError):
    """A host cannot connect to the driver."""


@dataclass(frozen=True)
class ServedArchive:
    """A packed environment, of ``size`` bytes, that the driver sends from ``address``."""

    address: str
    token: str = field(repr=False)
    size: int

    def read(self) -> Iterator[bytes]:
        """Yield the content in blocks.

        Raises
        ------
        ClusterError
            The driver cannot be reached (`UnreachedError`), or was lost.
        """
        stream = self._connect()
        rest = self.size
        try:
            while rest:
                block = stream.read_exactly(min(_BLOCK, rest), BLOCK_SECONDS)
                rest -= len(block)
                yield block
        except OSError as error:
            raise ClusterError(
                f"{os.uname().nodename} lost the driver at {self.address}, which was sending the "
                f"Python environment: {error}. If the driver is still running, start again"
            ) from error
        finally:
            stream.close()

    def _connect(self) -> Stream:
        deadline = time.monotonic() + _CONNECT_SECONDS
        while True:
            try:
                return connect(self.address, self.token, 0, PURPOSE, _CONNECT_SECONDS)
            except (OSError, ValueError) as error:  # a name that is too long is a `ValueError`
                # The driver closes connections while too many others greet it: of many hosts, some
                # cannot reach it at once.
                is_closed = isinstance(error, ConnectionError)
                is_answer = isinstance(error, RejectedError | ConnectionRefusedError)
                if not is_closed or is_answer or time.monotonic() > deadline:
                    raise UnreachedError(
                        f"{os.uname().nodename} cannot connect to the driver at {self.address}: "
                        f"{error}"
                    ) from error
            time.sleep(_PAUSE_SECONDS)


@dataclass(frozen=True)
class SparkEnvironment:
    """A packed environment for the executors.

    ``served`` is where the driver sends it from; None: every executor gets the file from Spark,
    with its first task.
    """

    packed: PackedEnvironment
    served: ServedArchive | None = None

    def __call__(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Unpack it in a Spark task; yield a row of `SCHEMA` if that is not possible."""
        import pyarrow as pa

        for _ in batches:  # else Spark ends this Python process, and starts another
            pass
        try:
            self.install()
        except ClusterError as error:
            columns = [pa.array([str(error)]), pa.array([isinstance(error, UnreachedError)])]
            yield pa.RecordBatch.from_arrays(columns, names=["problem", "is_unreached"])

    def install(self) -> Interpreter:
        """Unpack it on this host, unless another executor or an earlier call has done that.

        If the process that unpacks it is killed, the next one that waits takes over.

        Raises
        ------
        ClusterError
            It cannot run here, the disk is full, or the driver cannot be reached
            (`UnreachedError`).
        """
        root = _find_folder()
        # A lock of the system, as it ends with its process, unlike a file that exists
        # (test_another_executor_takes_over_from_one_that_is_killed).
        with open(os.path.join(root, f".{self.packed.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = install_here(self.packed, self._read(), root)
            if self.served is None:
                self._remove()
        return replace(found, paths=_list_paths())

    def _read(self) -> Iterable[bytes]:
        return read_blocks(self._find_file()) if self.served is None else self.served.read()

    def _find_file(self) -> str:
        from pyspark import SparkFiles

        return str(SparkFiles.get(FILE.format(self.packed.name)))

    def _remove(self) -> None:
        """Remove this executor's copy; the driver's own is needed by executors that start later."""
        archive, own = self._find_file(), self.packed.path
        with suppress(OSError):
            if not os.path.exists(own) or not os.path.samefile(own, archive):
                os.unlink(archive)


def _find_folder() -> str:
    for name, separator in _FOLDERS:
        for folder in os.environ.get(name, "").split(separator):
            if os.path.isdir(folder) and os.access(folder, os.W_OK):
                return folder
    from pyspark import SparkFiles

    return str(SparkFiles.getRootDirectory())


def _list_paths() -> tuple[str, ...]:
    """Return the paths of this package and of the modules that were added to the session."""
    from pyspark import SparkFiles

    own = os.path.abspath(Path(pybackend.__file__).parents[1])
    root = os.path.abspath(SparkFiles.getRootDirectory())
    found = [os.path.abspath(path or ".") for path in sys.path]
    added = [path for path in found if os.path.commonpath([root, path]) == root]
    return tuple(dict.fromkeys([own, *added]))
