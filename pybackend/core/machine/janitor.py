"""Processes that clean up when the process that started them ends for any reason."""

from __future__ import annotations

import os
import secrets
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pybackend.core.errors import ClusterError

# A shell that waits for the end of its input, because the pipe closes even if a process is killed.
# Processes that end at the same time may still write there, so it tries again for a while.
SWEEP = (
    'read -r _; n=0; while [ -e "$0" ] && [ $n -lt 50 ]; do rm -rf -- "$0" 2>/dev/null; '
    'n=$((n+1)); [ ! -e "$0" ] || sleep 0.1; done'
)
_SECONDS = 60.0


def check_temporary_folder() -> None:
    """Raise `ClusterError` if the folder for temporary files does not exist.

    Python remembers the folder that it has found first.
    """
    try:
        folder = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ClusterError(
            f"there is no folder for temporary files ({error.strerror}): set TMPDIR to a folder "
            "that you may write to, before this process starts"
        ) from error
    if not os.path.isdir(folder):
        raise ClusterError(
            f"{folder}, the folder for temporary files (TMPDIR), no longer exists: create "
            "it, or set TMPDIR to another folder and start this process again"
        )


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C must reach only the terminal's process group.
        start_new_session=True,
        cwd="/",
    )


def sweep(folder: str) -> subprocess.Popen[bytes]:
    """Start a process that removes a folder, or a file, when its input ends."""
    return _start(["/bin/sh", "-c", SWEEP, folder])


def end_sweep(janitor: subprocess.Popen[bytes]) -> None:
    """Let the process of `sweep` remove what is still there, and wait for its end."""
    assert janitor.stdin is not None
    # A process that was forked meanwhile may hold the pipe open, so that its end is not enough.
    # Calls waited for it (test_a_forked_process_that_holds_the_pipe_does_not_delay_the_end).
    with suppress(BrokenPipeError), janitor.stdin as pipe:
        pipe.write(b"\n")
    with suppress(subprocess.TimeoutExpired):  # it continues
        janitor.wait(_SECONDS)


@contextmanager
def swept_folder(parent: str | None = None, prefix: str = "tfdist-") -> Iterator[Path]:
    """Make a private folder, which is removed on exit, even if this process is killed."""
    if parent is None:
        check_temporary_folder()
    folder = Path(parent or tempfile.gettempdir(), f"{prefix}{secrets.token_hex(8)}")
    # It knows the folder first: this process may be killed at any moment. Folders were left when it
    # was killed right after `mkdir`
    # (test_a_process_that_is_killed_as_soon_as_there_is_a_folder_leaves_none).
    janitor = sweep(str(folder))
    try:
        folder.mkdir(mode=0o700)
        yield folder
    finally:
        end_sweep(janitor)


@contextmanager
def guarded(command: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Run a command that cleans up when its input ends; yield a function that calls it off.

    The command does nothing if it reads a line of text first.
    """
    process = _start(command)
    pipe = process.stdin
    assert pipe is not None

    def let_go() -> None:
        pipe.write(b"over\n")

    try:
        yield let_go
    finally:
        pipe.close()
        with suppress(subprocess.TimeoutExpired):  # the cluster does not respond: it continues
            process.wait(_SECONDS)
