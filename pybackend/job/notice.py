"""A SIGTERM as a notice: this process is to end soon, and may keep its training before."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pybackend.errors import Failure, TfdistError

_TOLD = "was told to end (SIGTERM)"
TOLD = f"the process {_TOLD}"
RESTARTS = "with `restarts` it starts again by itself"
# Signals in so short a time mean the same: of a process and of its group, say.
_SAME_SECONDS = 1.0


class Notice:
    """Return whether this process was told to end, by a SIGTERM that did not end it at once."""

    def __init__(self) -> None:
        self._came = math.inf

    def __call__(self) -> bool:
        """Return whether it was."""
        return self._came < math.inf

    def expect(self) -> bool:
        """From now on, SIGTERM does not end this process: it is a notice.

        Returns
        -------
        bool
            Whether that was possible: a SIGTERM that is handled or ignored already stays so, and
            only the main thread can change it.
        """
        is_free = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if not is_free or threading.current_thread() is not threading.main_thread():
            return False
        signal.signal(signal.SIGTERM, self.take)
        return True

    @contextmanager
    def expected(self, is_wanted: bool) -> Iterator[None]:
        """As `expect`, while this context lasts; a second SIGTERM ends the process, as ever.

        Parameters
        ----------
        is_wanted
            False leaves everything as it is.
        """
        is_taken = is_wanted and self.expect()
        if is_taken:
            signal.signal(signal.SIGTERM, self._take_once)
        try:
            yield
        finally:
            if is_taken and signal.getsignal(signal.SIGTERM) == self._take_once:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def pass_on(self) -> None:
        """End this process if it was told so, but had nothing left to keep."""
        if self():
            os.kill(os.getpid(), signal.SIGTERM)

    def take(self, number: int, frame: object) -> None:
        """Handle the signal."""
        self._came = min(self._came, time.monotonic())

    def _take_once(self, number: int, frame: object) -> None:
        if time.monotonic() > self._came + _SAME_SECONDS:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.take(number, frame)


def at_own_end(failure: Failure, notice: Notice) -> Failure:
    """A worker's failure, as it is where this process was told to end and has told its worker.

    That is no loss after which this process could start again.
    """
    if failure.exception_type != "Preempted" or not notice():
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
        kept = "a checkpoint of it was written" if is_kept else "no checkpoint could be written"
        super().__init__(f"all workers have left after {place}; {kept}")

    def describe(self, rank: int) -> tuple[str, str]:
        """What this is to a rank: type and message of its failure."""
        if rank in self.ranks:
            return "Preempted", f"{TOLD}; {self}"
        told = ", ".join(map(str, self.ranks))
        return "Stopped", f"left with worker {told}, which was told to end; {self}"


class LeftError(PreemptedError):
    """This worker was told to end, and has left an elastic training between two epochs.

    Parameters
    ----------
    epoch
        Which epoch was its last, from 1.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        TfdistError.__init__(self, f"it has left after epoch {epoch}")

    def describe(self, rank: int) -> tuple[str, str]:
        """See `PreemptedError`."""
        return "Preempted", f"{TOLD}; {self}"
