"""Clear errors when a system limit is reached: full disks, too many open files."""

from __future__ import annotations

import errno
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pybackend.errors import ClusterError
from pybackend.job.resources import show_bytes


@contextmanager
def naming_full_disk(folder: Path, content: str, variable: str = "TMPDIR") -> Iterator[None]:
    """Raise `ClusterError` with the disk's name if a write fails because the disk is full.

    Parameters
    ----------
    folder
        Folder that is written to.
    content
        Plural for the message, such as ``"rows"``.
    variable
        The environment variable that names another folder.

    Raises
    ------
    ClusterError
        The disk of ``folder`` is full, or the user's quota on it is used up.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        disk = shutil.disk_usage(folder)
        raise ClusterError(
            f"the disk that contains {folder} is full: {show_bytes(disk.free)} "
            f"of {show_bytes(disk.total)} are free, and the {content} need more. Free up space "
            f"there, or set {variable} to a folder on a larger disk"
        ) from error


@contextmanager
def naming_open_files() -> Iterator[None]:
    """Raise `ClusterError` with advice if an operation fails because too many files are open.

    Raises
    ------
    ClusterError
        This process or the machine has reached its limit.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise ClusterError(
            f"too many open files: the limit of this process is {most}. Close files and "
            "connections, or raise the limit before it starts (`ulimit -n 4096`)"
        ) from error
