"""A SIGTERM as a notice: this process is to end soon, and may keep its training before."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pybackend.errors import Failure, TfdistError

_TOLD = "was told to end (SIGTERM)"
TOLD = f"the process {_TOLD}"
RESTARTS = "with `restarts` it starts again by itself"


class Notice:
    """Whether this process was told to end."""

    has_come = False

    def __call__(self) -> bool:
        """As `has_come`."""
        return self.has_come


def at_own_end(failure: Failure, notice: Notice) -> Failure:
    """A worker's failure, as it is where this process was told to end and has told its worker.

    That is no loss after which this process could start again.
    """
    if failure.exception_type != "Preempted" or not notice.has_come:
        return failure
    message = failure.message.replace(TOLD, f"this process ({os.getpid()}) {_TOLD}")
    return replace(failure, exception_type="Terminated", message=message, advice="")


class PreemptedError(TfdistError):
    """Workers have left a training, all after the same step, because some were told to end.

    Parameters
    ----------
    ranks
        Who was told so.
    place
        After which step they have left, in words.
    is_kept
        Whether there is a checkpoint of it.
    """

    def __init__(self, ranks: Sequence[int], place: str, is_kept: bool) -> None:
        self.ranks = tuple(ranks)
        self.place = place
        kept = "is a checkpoint" if is_kept else "could be no checkpoint"
        super().__init__(f"all workers have left after {place}, of which there {kept}")

    def describe(self, rank: int) -> tuple[str, str]:
        """What this is to a rank: type and message of its failure."""
        if rank in self.ranks:
            return "Preempted", f"{TOLD}; {self}"
        told = ", ".join(map(str, self.ranks))
        return "Stopped", f"left with worker {told}, which was told to end; {self}"


@contextmanager
def catch_notice(is_wanted: bool = True) -> Iterator[Notice]:
    """While this context lasts, SIGTERM does not end this process: it is a notice.

    A SIGTERM that is handled or ignored already stays so; and only the main thread can change it.

    Parameters
    ----------
    is_wanted
        False leaves everything as it is.
    """
    notice = Notice()
    is_free = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    if not (is_wanted and is_free) or threading.current_thread() is not threading.main_thread():
        yield notice
        return

    def take(number: int, frame: object) -> None:
        notice.has_come = True

    signal.signal(signal.SIGTERM, take)
    try:
        yield notice
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
