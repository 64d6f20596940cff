"""The environment of a job's workers on an executor: found, or unpacked once per host.

This file is imported on the executors; the driver sends it there.
"""

from __future__ import annotations

import fcntl
import os
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pybackend
from pybackend.launchers.environment.archive import PackedEnvironment
from pybackend.launchers.environment.installing import Interpreter, install_here

# Folders that Spark removes with the application, in Spark's own order: those of a standalone
# cluster and of YARN are shared by the executors of a host, the last is the executor's.
_FOLDERS = (("SPARK_EXECUTOR_DIRS", os.pathsep), ("LOCAL_DIRS", ","), ("SPARK_LOCAL_DIRS", ","))


@dataclass(frozen=True)
class SparkEnvironment:
    """A packed environment that every executor gets from Spark, with its first task."""

    packed: PackedEnvironment

    def install(self) -> Interpreter:
        """Unpack it on this host, unless another executor or an earlier call has done that.

        Raises
        ------
        ClusterError
            It cannot run here, or the disk is full.
        """
        from pyspark import SparkFiles

        archive, root = Path(SparkFiles.get(self.packed.name)), _find_folder()
        with open(os.path.join(root, f".{self.packed.name}.lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = install_here(self.packed, archive, root)
            self._remove(archive)
        return replace(found, paths=_list_paths())

    def _remove(self, archive: Path) -> None:
        """Remove this executor's copy; the driver's own is needed by executors that start later."""
        with suppress(OSError):
            if not os.path.exists(self.packed.path) or not os.path.samefile(
                self.packed.path, archive
            ):
                archive.unlink()


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
