"""Temporary folders that are removed when their process ends for any reason."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A shell that waits for the end of its input, because the pipe closes even if a process is killed.
# Processes that end at the same time may still write there, so it tries again for a while.
SWEEP = (
    'read -r _; n=0; while [ -e "$0" ] && [ $n -lt 50 ]; do rm -rf -- "$0" 2>/dev/null; '
    'n=$((n+1)); [ ! -e "$0" ] || sleep 0.1; done'
)


@contextmanager
def swept_folder(parent: str | None = None) -> Iterator[Path]:
    """Make a private folder, which is removed on exit, even if this process is killed."""
    folder = tempfile.mkdtemp(prefix="tfdist-", dir=parent)
    janitor = subprocess.Popen(
        ["/bin/sh", "-c", SWEEP, folder],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C must reach only the terminal's process group.
        start_new_session=True,
    )
    try:
        yield Path(folder)
    finally:
        assert janitor.stdin is not None
        janitor.stdin.close()
        janitor.wait(timeout=30)
