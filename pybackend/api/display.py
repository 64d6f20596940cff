"""Where progress is shown: as lines, live in a terminal, or by a session of R."""

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
    """Shows nothing; what shows something derives from it.

    Attributes
    ----------
    shows_steps
        Whether `step` shows anything.
    """

    shows_steps = False

    def __exit__(self, *_: object) -> None:
        """Leave what was shown as it is."""

    def begin(self, text: str, job: Job) -> None:
        """Workers are being started."""
        self.line(text)

    def line(self, text: str) -> None:
        """Show a line."""

    def printed(self, text: str) -> None:
        """Show a line that a worker has printed."""

    def step(self, event: StepEnded) -> None:
        """Show how far the epoch is."""

    def epoch(self, event: EpochEnded, text: str) -> None:
        """Show that an epoch has ended."""
        self.line(text)


class Lines(Display):
    """Lines on standard output; those of workers only if wanted."""

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
        """See `Display`."""
        if self._shows_printed:
            self.line(text)


class Told(Lines):
    """A session of R shows it, which can be called on the thread that it calls from only.

    Events of other threads, which is how workers that sparklyr starts report, are plain lines.
    """

    def __init__(self, tell: Tell, shows_printed: bool, shows_steps: bool) -> None:
        super().__init__(shows_printed)
        self.shows_steps = shows_steps
        self._tell = tell
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        """See `Display`."""
        self._pass_on("end", {})

    def begin(self, text: str, job: Job) -> None:
        """See `Display`."""
        self._pass_on("begin", {"text": text})

    def line(self, text: str) -> None:
        """See `Display`."""
        if not self._pass_on("line", {"text": text}):
            super().line(text)

    def step(self, event: StepEnded) -> None:
        """See `Display`."""
        if not self.shows_steps:  # they are there for observers
            return
        loss = event.logs.get("loss")
        names = ("epoch", "epochs", "step", "steps", "rows", "seconds")
        figures = {name: getattr(event, name) for name in names}
        self._pass_on("step", {**figures, "loss": loss})

    def epoch(self, event: EpochEnded, text: str) -> None:
        """See `Display`."""
        if not self._pass_on("epoch", {"text": text, "epoch": event.epoch}):
            super().line(text)

    def _pass_on(self, kind: str, fields: Mapping[str, Any]) -> bool:
        if threading.get_ident() != self._thread:
            return False
        self._tell(kind, fields)
        return True
