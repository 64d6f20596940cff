"""A job that ends when its driver ends, however that is."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

# A shell that waits for the end of its input; a line of text says that the job is over already.
_CANCEL = 'read -r _ || scancel --quiet --name="$0" --user="$(id -un)"'
_CANCEL_SECONDS = 60.0


class Guard:
    """Cancels the jobs of a name when this process ends."""

    def __init__(self, name: str) -> None:
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _CANCEL, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # Ctrl-C is for the processes of the terminal's group.
            start_new_session=True,
        )

    def let_go(self) -> None:
        """There is nothing to cancel any more."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"over\n")

    def end(self) -> None:
        """Cancel them now, unless they were let go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):  # Slurm does not answer: it goes on trying
            self._process.wait(timeout=_CANCEL_SECONDS)


@contextmanager
def cancelled_in_the_end(name: str) -> Iterator[Guard]:
    """Cancel the jobs of a name on leaving, and if this process is killed."""
    guard = Guard(name)
    try:
        yield guard
    finally:
        guard.end()
