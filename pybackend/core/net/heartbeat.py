"""Signs of life between a worker's launcher and the driver, to detect stopped processes.

The system answers packets on behalf of a stopped process, so the connection alone does not reveal
it. The process that sends signs of life only supervises a worker, so the worker's computation does
not delay them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pybackend.core.net.connection_errors import SilentError
from pybackend.core.net.stream import LineStream

# On a loaded machine, a process may not run for a while.
SHORTEST_SILENCE = 5.0
_LONGEST_PAUSE = 5.0
_PAUSES = 8
# Number of successive checks without a sign of life until the other end counts as silent. They are
# counted, not timed, because a process that was stopped itself has not checked.
_LOOKS = 4
# The system's timeout for waiting is limited to less than a month.
_LONGEST_LOOK = 86_400.0


@dataclass(frozen=True)
class Beat:
    """Sign of life."""


def find_silence(timeout: float) -> float:
    """Return after how many silent seconds a process counts as lost, given a job's timeout."""
    return max(SHORTEST_SILENCE, timeout)


def start_beating(send: Callable[[], object], silence: float, ended: threading.Event) -> None:
    """Call ``send`` several times per ``silence`` seconds, in a thread, until the event is set."""
    pause = min(_LONGEST_PAUSE, silence / _PAUSES)

    def beat() -> None:
        while not ended.wait(pause):
            send()

    threading.Thread(target=beat, daemon=True).start()


def read_lines(stream: LineStream, limit: int, silence: float) -> Iterator[bytes]:
    """Yield the received lines, until the connection ends.

    Parameters
    ----------
    limit
        Maximum bytes in a line, as in `Stream.read_line`.
    silence
        Maximum number of seconds between received bytes; infinite for no limit.

    Raises
    ------
    SilentError
        Nothing was received during this time.
    OSError, ValueError
        As in `Stream.read_line`.
    """
    seconds = None if math.isinf(silence) else min(_LONGEST_LOOK, silence / (_LOOKS + 1))
    looks = 0
    while looks < _LOOKS:
        heard = stream.heard
        try:
            line = stream.read_line(limit, seconds)
        except TimeoutError as error:
            if error.errno is not None:  # the system has closed the connection
                raise
            looks = looks + 1 if stream.heard == heard else 0
            continue
        if not line:
            return
        looks = 0
        yield line
    raise SilentError(f"the other end has shown no sign of life for {silence:g} s")
