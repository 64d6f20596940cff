"""A disk that is full, named."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pybackend.errors import ClusterError
from pybackend.job.resources import show_bytes


@contextmanager
def naming_full_disk(folder: Path, content: str) -> Iterator[None]:
    """Say which disk is full if a write inside fails for that.

    Parameters
    ----------
    folder
        Where it is written.
    content
        What is written, for the message: ``"rows"``.

    Raises
    ------
    ClusterError
        The disk of ``folder`` is full, or the user's share of it is.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        disk = shutil.disk_usage(folder)
        raise ClusterError(
            f"the disk of {folder} is full: of its {show_bytes(disk.total)} "
            f"{show_bytes(disk.free)} are free, and the {content} need more. Free space there, or "
            "set TMPDIR to a folder on a larger disk"
        ) from error
