"""Progress displays: plain lines, live in a terminal or notebook, or in an R session."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from pybackend.core.job.arguments import counted
from pybackend.core.job.job import Job
from pybackend.core.job.messages import EpochEnded, Phase, StepEnded
from pybackend.core.words import show_loss, show_seconds

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

Tell = Callable[[str, Mapping[str, Any]], object]


class Display(AbstractContextManager[None]):
    """Base class of displays; it shows nothing itself.

    Attributes
    ----------
    shows_steps
        True if `step` shows anything.
    """

    shows_steps = False

    def __exit__(self, *_: object) -> None:
        """End the display; its output stays visible."""

    def begin(self, text: str, job: Job) -> None:
        """Show that workers are being started."""
        self.line(text)

    def line(self, text: str) -> None:
        """Show a line."""

    def printed(self, text: str) -> None:
        """Show a line that a worker printed."""

    def phase(self, event: Phase) -> None:
        """Show what the workers do before their first step."""

    def step(self, event: StepEnded) -> None:
        """Show how far the epoch is."""

    def trials(self, text: str, done: int, total: int) -> None:
        """Show a line about a search, of whose ``total`` trials ``done`` have ended."""
        self.line(text)

    def ended(self, status: str) -> None:
        """Note the status of a detached job at the end of waiting for it."""

    def epoch(self, event: EpochEnded, text: str) -> None:
        """Show that an epoch has ended."""
        self.line(text)


# Seconds of an epoch without a line before the first, the second, and every other line of a step.
_SILENCES = (10.0, 60.0, 300.0)


class StepLines:
    """Choose the steps that lines show: at growing intervals, so that a log stays short."""

    def __init__(self) -> None:
        self._silences = list(_SILENCES)
        self._first: StepEnded | None = None
        self._shown = 0.0

    def end_epoch(self) -> None:
        """Note that a line shows the end of the epoch."""
        self._first, self._shown = None, 0.0

    def describe(self, event: StepEnded) -> str | None:
        """Return a line; None for most steps."""
        if self._first is None:
            self._first = event
        if event.seconds - self._shown < self._silences[0]:
            return None
        first, self._first, self._shown = self._first, event, event.seconds
        if len(self._silences) > 1:
            del self._silences[0]
        line = f"epoch {event.epoch}: step {event.step} of {event.steps}"
        steps, seconds = event.step - first.step, event.seconds - first.seconds
        if steps <= 0 or seconds <= 0:
            return line
        left = show_seconds((event.steps - event.step) * seconds / steps, is_estimate=True)
        return f"{line}, {show_speed(steps / seconds)}, {left} left"


class Lines(Display):
    """Print lines on standard output; lines from workers only with ``shows_printed``."""

    shows_steps = True

    def __init__(self, shows_printed: bool) -> None:
        self._shows_printed = shows_printed
        self._step_lines = StepLines()

    def line(self, text: str) -> None:
        """Print a line; if writing fails, the training run continues."""
        try:
            print(text, flush=True)
        except UnicodeEncodeError:  # a terminal of ASCII
            encoding = getattr(sys.stdout, "encoding", None) or "ascii"
            with suppress(OSError, ValueError):
                print(text.encode(encoding, "replace").decode(encoding), flush=True)
        except (OSError, ValueError):  # a closed pipe, a full disk, a stream that was closed
            pass

    def printed(self, text: str) -> None:
        """Print a worker's line, if requested."""
        if self._shows_printed:
            self.line(text)

    def phase(self, event: Phase) -> None:
        """Print a phase that lasts."""
        if event.lasts:
            self.line(f"{event.name} ...")

    def step(self, event: StepEnded) -> None:
        """Print a step of a long epoch."""
        if text := self._step_lines.describe(event):
            self.line(text)

    def epoch(self, event: EpochEnded, text: str) -> None:
        """Print that an epoch has ended."""
        self._step_lines.end_epoch()
        self.line(text)


class Relay(Lines):
    """Pass progress to an R session, which may only be called from the thread that called Python.

    Events on other threads, such as those of workers started by sparklyr, become plain lines.
    """

    def __init__(self, tell: Tell, shows_printed: bool, is_live: bool) -> None:
        super().__init__(shows_printed)
        self._is_live = is_live
        self._tell = tell
        self._thread = threading.get_ident()

    def __exit__(self, *_: object) -> None:
        """Notify R that the display has ended."""
        self._pass_on("end", {})

    def begin(self, text: str, job: Job) -> None:
        """Notify R that workers are being started."""
        self._pass_on("begin", {"text": text})

    def line(self, text: str) -> None:
        """Show a line in R, or print it."""
        if not self._pass_on("line", {"text": text}):
            super().line(text)

    def phase(self, event: Phase) -> None:
        """Show a phase in R's bar; without one, a line if it lasts."""
        if not (self._is_live and self._pass_on("phase", {"name": event.name})):
            super().phase(event)

    def step(self, event: StepEnded) -> None:
        """Pass a step's values to R, if R shows a bar."""
        if not self._is_live:
            super().step(event)
            return
        loss = event.logs.get("loss")
        names = ("epoch", "epochs", "step", "steps", "rows", "seconds")
        values = {name: getattr(event, name) for name in names}
        self._pass_on("step", {**values, "loss": loss})

    def trials(self, text: str, done: int, total: int) -> None:
        """Show a line about a search in R, or print it."""
        if not self._pass_on("trials", {"text": text, "done": done, "total": total}):
            super().line(text)

    def ended(self, status: str) -> None:
        """Pass the status of a detached job to R."""
        self._pass_on("status", {"status": status})

    def epoch(self, event: EpochEnded, text: str) -> None:
        """Show the end of an epoch in R, or print it."""
        self._step_lines.end_epoch()
        values = {"text": text, "epoch": event.epoch, "epochs": event.epochs}
        if not self._pass_on("epoch", values):
            super().line(text)

    def _pass_on(self, kind: str, fields: Mapping[str, Any]) -> bool:
        if threading.get_ident() != self._thread:
            return False
        self._tell(kind, fields)
        return True


# Number of reports over which the speed is measured; the very first step is slow.
_RECENT = 20


class Live(Lines):
    """Show a progress bar for the current epoch, below all lines."""

    def __init__(self, shows_printed: bool, console: Console | None = None) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

        super().__init__(shows_printed)
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.fields[values]}"),
            console=console,
            transient=True,
            refresh_per_second=4,
        )
        self._speed = Speed()
        self._workers = ""
        self._task: TaskID | None = None

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._progress.stop()

    def begin(self, text: str, job: Job) -> None:
        """Show the bar."""
        self._workers = counted(dict(job.roles).get("worker", job.workers), "worker")
        self.line(text)
        self._progress.start()
        self._task = self._progress.add_task(f"{self._workers}  starting", total=None, values="")

    def line(self, text: str) -> None:
        """Print a line above the bar."""
        from rich.text import Text

        # As text: rich would interpret brackets as markup, and colour numbers.
        self._progress.console.print(Text(text), highlight=False, soft_wrap=True)

    def phase(self, event: Phase) -> None:
        """Name the phase in the bar."""
        if self._task is not None:
            text = f"{self._workers}  {event.name}"
            self._progress.update(self._task, description=text, refresh=True)

    def step(self, event: StepEnded) -> None:
        """Update the bar after a step."""
        if self._task is None:
            return
        self._speed.note(event)
        loss = event.logs.get("loss")
        values = [
            f"step {event.step}/{event.steps}",
            f"loss {show_loss(loss)}" if isinstance(loss, float) else "",
            *self._speed.describe(event),
        ]
        self._progress.update(
            self._task,
            description=f"{self._workers}  epoch {event.epoch}/{event.epochs}",
            completed=event.step,
            total=event.steps,
            values="  ".join(filter(None, values)),
            refresh=True,
        )

    def epoch(self, event: EpochEnded, text: str) -> None:
        """Reset the bar for the next epoch, and print the line for this one."""
        self._speed.end_epoch()
        if self._task is not None:
            following = min(event.epoch + 1, event.epochs)
            self._progress.update(
                self._task,
                description=f"{self._workers}  epoch {following}/{event.epochs}",
                completed=0,
                values="",
            )
        self.line(text)


class Speed:
    """Speed of the last reported steps."""

    def __init__(self) -> None:
        self._recent: deque[StepEnded] = deque(maxlen=_RECENT)

    def note(self, event: StepEnded) -> None:
        """Add a report."""
        self._recent.append(event)

    def end_epoch(self) -> None:
        """Discard the reports: each epoch counts its steps and rows from 0."""
        self._recent.clear()

    def describe(self, event: StepEnded) -> list[str]:
        """Return rows per second and the remaining time; empty after only one report."""
        first = self._recent[0] if self._recent else event
        steps, seconds = event.step - first.step, event.seconds - first.seconds
        if steps <= 0 or seconds <= 0:
            return []
        left = event.steps - event.step + event.steps * (event.epochs - event.epoch)
        speed = (event.rows - first.rows) / seconds
        return [
            f"{speed:,.0f} rows/s",
            f"ETA {show_seconds(left * seconds / steps, is_estimate=True)}",
        ]


def show_speed(speed: float) -> str:
    """Format a speed, as ``55 steps/s`` or ``0.12 steps/s``."""
    return f"{speed:,.2g} steps/s" if speed < 10 else f"{speed:,.0f} steps/s"


_teller: ContextVar[Tell | None] = ContextVar("teller", default=None)


@contextmanager
def relayed_to(tell: Tell) -> Iterator[None]:
    """Have the function ``tell`` show the progress of all calls within this context."""
    token = _teller.set(tell)
    try:
        yield
    finally:
        _teller.reset(token)


def choose_lines(verbose: int) -> Display:
    """Return a display that prints lines."""
    if verbose == 0:
        return Display()
    tell = _teller.get()
    shows_printed = verbose > 1
    return Lines(shows_printed) if tell is None else Relay(tell, shows_printed, False)


def choose_display(job: Job) -> Display:
    """Return the display for a whole job."""
    if job.verbose == 0 or job.kind != "train":
        return choose_lines(job.verbose)
    tell, shows_printed = _teller.get(), job.verbose > 1
    if tell is not None:
        return Relay(tell, shows_printed, bool(tell("is_live", {})))
    if _is_live():
        return Live(shows_printed)
    return Lines(shows_printed)


def _is_live() -> bool:
    """Return whether the output can change in place: on a terminal, or in a notebook."""
    from rich.console import Console

    console = Console()
    if console.is_jupyter:
        # rich uses it to update the output of a cell.
        return importlib.util.find_spec("ipywidgets") is not None
    try:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
    except ValueError:  # it was closed
        return False
    return is_terminal and console.is_terminal and not console.is_dumb_terminal
