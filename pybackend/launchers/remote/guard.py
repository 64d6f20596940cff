"""Clean up on a cluster when this process ends for any reason."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

_SECONDS = 60.0


@contextmanager
def guarded(command: Sequence[str]) -> Iterator[Callable[[], None]]:
    """Run a command that cleans up when its input ends; yield a function that calls it off.

    The command does nothing if it reads a line of text first.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # Ctrl-C must reach only the terminal's process group.
        start_new_session=True,
        cwd="/",
    )
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
