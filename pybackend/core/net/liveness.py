"""Signs of life, to detect processes that are stopped, and time limits for calls that have none.

The system answers packets on behalf of a stopped process, so a connection alone does not reveal it.
The process that sends signs of life only supervises a worker, so the worker's computation does not
delay them.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TypeVar

from pybackend.core.net.stream import LineStream

_Value = TypeVar("_Value")

# On a loaded machine, a process may not run for a while.
SHORTEST_SILENCE = 5.0
_LONGEST_PAUSE = 5.0
_PAUSES = 8
# Number of successive checks without a sign of life until the other end counts as silent. They are
# counted, not timed, because a process that was stopped itself has not checked.
_LOOKS = 4
# The system's timeout for waiting is limited to less than a month.
_LONGEST_LOOK = 86_400.0


class SilentError(ConnectionError):
    """The other end has shown no sign of life for too long, though it is connected."""

    @classmethod
    def after(cls, seconds: float) -> SilentError:
        return cls(f"the other end has shown no sign of life for {seconds:g} s")


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
    """Yield the received lines, of at most ``limit`` bytes, until the connection ends.

    Raises `SilentError` if nothing was received for ``silence`` seconds (infinite: no limit), and
    the errors of `Stream.read_line`.
    """
    seconds = None if math.isinf(silence) else min(_LONGEST_LOOK, silence / (_LOOKS + 1))
    looks = 0
    while looks < _LOOKS:
        heard = stream.heard
        try:
            if not (line := stream.read_line(limit, seconds)):
                return
            looks = 0
            yield line
        except TimeoutError as error:
            if error.errno is not None:  # the system has closed the connection
                raise
            # A part of a long line is a sign of life, too.
            looks = looks + 1 if stream.heard == heard else 0
    raise SilentError.after(silence)


def within(seconds: float, call: Callable[[], _Value], late: Exception) -> _Value:
    """Return the value of a call, or raise its exception; raise ``late`` if it takes longer.

    A late call continues in a daemon thread, which does not keep the process alive.
    """
    outcome: Future[_Value] = Future()
    # Not an executor: at the end of the process, Python waits for its threads.
    threading.Thread(target=settle, args=(outcome, call), daemon=True).start()
    wait([outcome], timeout=seconds)
    if not outcome.done():
        raise late
    return outcome.result()


def settle(outcome: Future[_Value], call: Callable[[], _Value]) -> None:
    """Call a function, and set its value or exception as the outcome for another thread."""
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(error)
