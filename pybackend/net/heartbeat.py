"""Signs of life between a member and the driver: they tell a stopped process from a quiet one.

The system answers for a process that is stopped, so a connection alone does not tell. The process
that sends them does nothing but look after a worker: what the worker computes delays none.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from pybackend.net.connection_errors import SilentError
from pybackend.net.stream import LineStream

# On a machine with much else to do, a process may not be given any time for a while.
SHORTEST_SILENCE = 5.0
_LONGEST_PAUSE = 5.0
_PAUSES = 8
# Looks that find nothing, one after the other, until the other end counts as silent. They are
# counted rather than timed: a process that was stopped itself has not looked.
_LOOKS = 4
# What the system's clock for waiting can hold is less than a month.
_LONGEST_LOOK = 86_400.0


@dataclass(frozen=True)
class Beat:
    """A sign of life."""


def find_silence(timeout: float) -> float:
    """Seconds without a sign of life after which a process counts as lost, for a job's timeout."""
    return max(SHORTEST_SILENCE, timeout)


def start_beating(send: Callable[[], object], silence: float, ended: threading.Event) -> None:
    """Call ``send`` several times in ``silence`` seconds, on a thread, until the event is set."""
    pause = min(_LONGEST_PAUSE, silence / _PAUSES)

    def beat() -> None:
        while not ended.wait(pause):
            send()

    threading.Thread(target=beat, daemon=True).start()


def read_lines(stream: LineStream, limit: int, silence: float) -> Iterator[bytes]:
    """The lines that come, up to the end of the connection.

    Parameters
    ----------
    limit
        Largest line in bytes, as in `Stream.read_line`.
    silence
        Seconds in which something must come; infinite for no limit.

    Raises
    ------
    SilentError
        If nothing has come for so long.
    OSError, ValueError
        As `Stream.read_line`.
    """
    seconds = None if math.isinf(silence) else min(_LONGEST_LOOK, silence / (_LOOKS + 1))
    looks = 0
    while looks < _LOOKS:
        heard = stream.heard
        try:
            line = stream.read_line(limit, seconds)
        except TimeoutError as error:
            if error.errno is not None:  # the system has given the connection up
                raise
            looks = looks + 1 if stream.heard == heard else 0
            continue
        if not line:
            return
        looks = 0
        yield line
    raise SilentError(f"the other end has shown no sign of life for {silence:g} s")
