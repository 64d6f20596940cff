"""Display of progress: as lines, live in a terminal, or by an R session."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from typing import Any

from pybackend.job.job import Job
from pybackend.job.messages import EpochEnded, StepEnded

Tell = Callable[[str, Mapping[str, Any]], object]


class Display(AbstractContextManager[None]):
    """Base class of displays, which shows nothing.

    Attributes
    ----------
    shows_steps
        True if `step` shows anything.
    """

    shows_steps = False

    def __exit__(self, *_: object) -> None:
        """End the display; what was shown stays."""

    def begin(self, text: str, job: Job) -> None:
        """Show that workers are being started."""
        self.line(text)

    def line(self, text: str) -> None:
        """Show a line."""

    def printed(self, text: str) -> None:
        """Show a line that a worker printed."""

    def step(self, event: StepEnded) -> None:
        """Show how far the epoch is."""

    def epoch(self, event: EpochEnded, text: str) -> None:
        """Show that an epoch has ended."""
        self.line(text)


class Lines(Display):
    """Print lines on standard output; those of workers only with ``shows_printed``."""

    def __init__(self, shows_printed: bool) -> None:
        self._shows_printed = shows_printed

    def line(self, text: str) -> None:
        """Print a line; an output that cannot be written does not end a training."""
        try:
            print(text, flush=True)
        except UnicodeEncodeError:  # a terminal of ASCII
            encoding = getattr(sys.stdout, "encoding", None) or "ascii"
            with suppress(OSError, ValueError):
                print(text.encode(encoding, "replace").decode(encoding), flush=True)
        except (OSError, ValueError):  # a closed pipe, a full disk, a stream that was closed
            pass

    def printed(self, text: str) -> None:
        """Print a line of a worker, if wanted."""
        if self._shows_printed:
            self.line(text)


class Told(Lines):
    """Pass progress to an R session, which can only be called on the thread that it calls from.

    Events on other threads, as with workers that sparklyr starts, become plain lines.
    """

    def __init__(self, tell: Tell, shows_printed: bool, shows_steps: bool) -> None:
        super().__init__(shows_printed)
        self.shows_steps = shows_steps
        self._tell = tell
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        """Tell R that the display ends."""
        self._pass_on("end", {})

    def begin(self, text: str, job: Job) -> None:
        """Tell R that workers are being started."""
        self._pass_on("begin", {"text": text})

    def line(self, text: str) -> None:
        """Show a line in R, or print it."""
        if not self._pass_on("line", {"text": text}):
            super().line(text)

    def step(self, event: StepEnded) -> None:
        """Pass a step's values to R, if R shows steps."""
        if not self.shows_steps:  # the events are only for observers
            return
        loss = event.logs.get("loss")
        names = ("epoch", "epochs", "step", "steps", "rows", "seconds")
        values = {name: getattr(event, name) for name in names}
        self._pass_on("step", {**values, "loss": loss})

    def epoch(self, event: EpochEnded, text: str) -> None:
        """Show the end of an epoch in R, or print it."""
        if not self._pass_on("epoch", {"text": text, "epoch": event.epoch}):
            super().line(text)

    def _pass_on(self, kind: str, fields: Mapping[str, Any]) -> bool:
        if threading.get_ident() != self._thread:
            return False
        self._tell(kind, fields)
        return True
