"""Preemption notice: on SIGTERM, a process saves the state of training before it exits."""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from pybackend.core.errors import Failure, Kind, TfdistError

_PREEMPTED = "received SIGTERM"
PREEMPTED = f"the process {_PREEMPTED}"
RESTARTS = "with `restarts` in `recovery`, it restarts automatically"
# Signals within this time count as one: a process and its group may both get one.
_SAME_SECONDS = 1.0


class Notice:
    """Record of a SIGTERM that did not end this process immediately."""

    def __init__(self) -> None:
        self._came = math.inf

    def __call__(self) -> bool:
        return self._came < math.inf

    def expect(self) -> bool:
        """Record SIGTERM from now on, instead of ending this process; return whether this works.

        An existing handler of SIGTERM is not replaced, and only the main thread can set one.
        """
        is_free = signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
        if not is_free or threading.current_thread() is not threading.main_thread():
            return False
        signal.signal(signal.SIGTERM, self.take)
        return True

    @contextmanager
    def expected(self, is_wanted: bool) -> Iterator[None]:
        """Record SIGTERM within this context, if wanted; a second SIGTERM ends the process."""
        is_taken = is_wanted and self.expect()
        if is_taken:
            signal.signal(signal.SIGTERM, self._take_once)
        try:
            yield
        finally:
            if is_taken and signal.getsignal(signal.SIGTERM) == self._take_once:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def pass_on(self) -> None:
        """End this process if it received SIGTERM but had nothing left to save."""
        if self():
            os.kill(os.getpid(), signal.SIGTERM)

    def take(self, number: int, frame: object) -> None:
        self._came = min(self._came, time.monotonic())

    def _take_once(self, number: int, frame: object) -> None:
        # The default action, not an exception: this process may be anywhere, even in a C call.
        if time.monotonic() > self._came + _SAME_SECONDS:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.take(number, frame)


def at_own_end(failure: Failure, notice: Notice) -> Failure:
    """Return a worker's failure: ``Terminated`` if this process passed on the SIGTERM it received.

    After such a failure this process cannot start the worker again.
    """
    if failure.exception_type != "Preempted" or not notice():
        return failure
    message = failure.message.replace(PREEMPTED, f"this process ({os.getpid()}) {_PREEMPTED}")
    return replace(failure, exception_type="Terminated", message=message, advice="")


class PreemptedError(TfdistError):
    """All workers left training after the same step, because those with these ranks were preempted.

    ``step`` is in words; ``is_saved``: a checkpoint was written at that step.
    """

    def __init__(self, ranks: Sequence[int], step: str, is_saved: bool) -> None:
        self.ranks = tuple(ranks)
        saved = "a checkpoint was written" if is_saved else "no checkpoint could be written"
        super().__init__(f"all workers left the training after {step}; {saved}")

    def describe(self, rank: int) -> tuple[Kind, str]:
        """Return the type and message of a rank's failure."""
        if rank in self.ranks:
            return "Preempted", f"{PREEMPTED}; {self}"
        preempted = ", ".join(map(str, self.ranks))
        return "Stopped", f"left because worker {preempted} was preempted; {self}"


class LeftError(PreemptedError):
    """This worker was preempted, and left elastic training after an epoch, counted from 1."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        TfdistError.__init__(self, f"it left the training after epoch {epoch}")

    def describe(self, rank: int) -> tuple[Kind, str]:
        return "Preempted", f"{PREEMPTED}; {self}"
