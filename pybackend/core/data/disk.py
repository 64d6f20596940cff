"""Clear errors of disks and limits: full disks, deleted folders, large files, many open files."""

from __future__ import annotations

import errno
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pybackend.core.errors import ClusterError
from pybackend.core.words import show_bytes


@contextmanager
def naming_full_disk(folder: Path, content: str, variable: str = "TMPDIR") -> Iterator[None]:
    """Raise `ClusterError` with the path if a write fails because of a limit: of a disk or a file.

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
        The disk of ``folder`` is full, the user's quota on it is used up, or a file there has the
        size that the system allows.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise _describe_large_file(folder, content) from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        disk = shutil.disk_usage(folder)
        raise ClusterError(
            f"the disk that contains {folder} is full: {show_bytes(disk.free)} "
            f"of {show_bytes(disk.total)} are free, and the {content} need more. Free up space "
            f"there, or set {variable} to a folder on a larger disk"
        ) from error


def _describe_large_file(folder: Path, content: str) -> ClusterError:
    """Return the error for the largest file in a folder; the system's error has no name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size, default=folder)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return ClusterError(
            f"{largest} cannot become larger on this disk, and the {content} need more: set TMPDIR "
            "to a folder on another disk"
        )
    return ClusterError(
        f"{largest} reached the size limit for files of this process, {show_bytes(limit)}, and the "
        f"{content} need more: raise the limit before the process starts (`ulimit -f unlimited`)"
    )


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
