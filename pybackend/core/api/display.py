"""Show a job's progress: as plain lines, live in a terminal or notebook, or in an R session."""

from __future__ import annotations

import importlib.util
import logging
import math
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from pybackend.core.job.arguments import counted
from pybackend.core.job.job import LOGGER, Job
from pybackend.core.job.messages import (
    Emit,
    EpochEnded,
    Event,
    Note,
    Phase,
    Phases,
    PrintedLine,
    StepEnded,
    Waits,
)
from pybackend.core.launchers import holding
from pybackend.core.tf_config import describe_processes
from pybackend.core.words import show_loss, show_seconds, term

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

# Workers that wait for the same one say so within seconds, then not again for a minute.
_RECENT_SECONDS = 20.0
_NO_NUMBER = (
    "the loss became NaN or infinite: look for missing or infinite values in the features, or "
    "lower the learning rate. {} in `callbacks` stops training when this happens"
)
_Shown = EpochEnded | StepEnded | Note | Waits | PrintedLine


def printer(verbose: int) -> Emit:
    """Return a function that shows events, as `choose_lines` does."""
    return Narrator(choose_lines(verbose))


def say(text: str, verbose: int) -> None:
    """Show a line, unless ``verbose`` is 0."""
    choose_lines(verbose).line(text)


@contextmanager
def showing(phase: str, verbose: int) -> Iterator[None]:
    """Show what this process does, as a phase of a worker, if it takes more than a moment."""
    phases = Phases(Narrator(choose_lines(verbose)))
    phases(Phase(phase))
    try:
        yield
    finally:
        phases.end()


def describe_start(launcher: Any, job: Job) -> str:
    """Describe the start, e.g. ``Starting 3 workers: processes of this machine ...``."""
    where = getattr(launcher, "where", None)
    started = describe_processes(job.roles, job.workers)
    return f"Starting {started}{f': {where}' if where else ''} ..."


def epoch_line(event: EpochEnded) -> str:
    """Return a line for an epoch, e.g. ``epoch 1/3  loss 0.2912  accuracy 0.9145  (4.1 s)``."""
    return f"epoch {event.epoch}/{event.epochs}  {_list_metrics(event)}  ({event.seconds:.1f} s)"


def step_line(event: StepEnded) -> str:
    """Return a line for a step, e.g. ``epoch 1, step 5/20  loss 0.7500``."""
    return f"epoch {event.epoch}, step {event.step}/{event.steps}  {_list_metrics(event)}"


def _list_metrics(event: EpochEnded | StepEnded) -> str:
    metrics = event.logs.items()
    return "  ".join(
        f"{name} {show_loss(value)}" for name, value in metrics if isinstance(value, float)
    )


class Narrator:
    """Write events as text to a display and, unless ``logs`` is False, to Python's logging."""

    def __init__(self, display: Display, logs: bool = True) -> None:
        self._display = display
        self._log = log_event if logs else lambda event, text: None
        self._heard: dict[int, float] = {}
        self._named: dict[int, float] = {}
        self._is_finite = True

    def __call__(self, event: Event) -> None:
        # All ranks send the same epochs and notes.
        is_first = event.rank == 0
        if isinstance(event, PrintedLine):
            self._log(event, event.text)
            self._display.printed(f"[{event.rank}] {event.text}")
        elif isinstance(event, Waits):
            self._note_waiting(event)
        elif isinstance(event, Note) and is_first:
            self._note(event, event.text)
        elif isinstance(event, Phase) and is_first:
            self._display.phase(event)
        elif isinstance(event, StepEnded) and is_first:
            self._log(event, step_line(event))
            self._display.step(event)
        elif isinstance(event, EpochEnded) and is_first:
            self._log(event, epoch_line(event))
            self._display.epoch(event, epoch_line(event))
            if self._is_finite and not math.isfinite(event.logs.get("loss", 0.0)):
                self._is_finite = False
                self._note(event, _NO_NUMBER.format(term("keras.callbacks.TerminateOnNaN()")))

    def _note_waiting(self, event: Waits) -> None:
        """Name the worker that all wait for, unless it is itself waiting, or was named recently."""
        now, peer = time.monotonic(), event.peer
        self._heard[event.rank] = now
        last = max(known.get(peer, -math.inf) for known in (self._heard, self._named))
        if event.is_second and now - last >= _RECENT_SECONDS:
            self._named[peer] = now
            self._note(
                event,
                f"waiting for worker {peer} for {event.seconds:.0f} s (alive: loading data, "
                "computing, or in a callback)",
            )

    def _note(self, event: EpochEnded | Note | Waits, text: str) -> None:
        self._log(event, text)
        self._display.line(f"note: {text}")


def log_start(text: str) -> None:
    LOGGER.info(text, extra={"rank": None, "host": socket.gethostname()})


def log_event(event: _Shown, text: str) -> None:
    """Log an event: epochs and notes as INFO, steps and printed lines as DEBUG.

    Records have the attributes ``rank`` and ``host``; epochs and steps also ``epoch`` and ``logs``.
    """
    level = logging.DEBUG if isinstance(event, StepEnded | PrintedLine) else logging.INFO
    if not LOGGER.isEnabledFor(level):
        return
    extra = {"rank": event.rank, "host": event.host}
    if isinstance(event, EpochEnded | StepEnded):
        extra |= {"epoch": event.epoch, "logs": dict(event.logs)}
    where = f" on {event.host}" if event.host else ""
    LOGGER.log(level, "worker %d%s: %s", event.rank, where, text, extra=extra)


Tell = Callable[[str, Mapping[str, Any]], object]


# Seconds of an epoch without a line before the first, the second, and every other line of a step.
_SILENCES = (10.0, 60.0, 300.0)


class StepLines:
    """Choose the steps that lines show: at growing intervals, so that a log stays short."""

    def __init__(self) -> None:
        self._silences = list(_SILENCES)
        self._first: StepEnded | None = None
        self._shown = 0.0

    def end_epoch(self) -> None:
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


def _print(text: str) -> None:
    """Print a line; if writing fails, the training run continues."""
    # A closed pipe, a full disk, a stream that was closed.
    with suppress(OSError, ValueError):
        try:
            print(text, flush=True)
        except UnicodeEncodeError:  # a terminal of ASCII
            encoding = getattr(sys.stdout, "encoding", None) or "ascii"
            print(text.encode(encoding, "replace").decode(encoding), flush=True)


class Display(AbstractContextManager[None]):
    """Print lines on standard output, or pass them to a function; base of all displays.

    Lines from workers are only shown with ``shows_printed``. ``shows_steps``: `step` shows
    anything.
    """

    shows_steps = True

    def __init__(self, shows_printed: bool, write: Callable[[str], object] | None = None) -> None:
        self._shows_printed = shows_printed
        self._step_lines = StepLines()
        self._write = write or _print

    def __exit__(self, *_: object) -> None:
        """End the display; its output stays visible."""

    def begin(self, text: str, job: Job) -> None:
        self.line(text)

    def line(self, text: str) -> None:
        self._write(text)

    def printed(self, text: str) -> None:
        """Show a line that a worker printed."""
        if self._shows_printed:
            self.line(text)

    def phase(self, event: Phase) -> None:
        """Show what the workers do before their first step."""
        if event.lasts:
            self.line(f"{event.name} ...")

    def step(self, event: StepEnded) -> None:
        """Show how far the epoch is."""
        if text := self._step_lines.describe(event):
            self.line(text)

    def epoch(self, event: EpochEnded, text: str) -> None:
        self._step_lines.end_epoch()
        self.line(text)

    def trials(self, text: str, done: int, total: int) -> None:
        """Show a line about a search, of whose ``total`` trials ``done`` have ended."""
        self.line(text)

    def ended(self, status: str) -> None:
        """Note the status of a detached job at the end of waiting for it."""


class Silent(Display):
    shows_steps = False

    def line(self, text: str) -> None:
        """Show nothing."""


class Relay(Display):
    """Pass progress to an R session, which may only be called from the thread that called Python.

    Events on other threads, such as those of workers started by sparklyr, become plain lines.
    """

    def __init__(self, tell: Tell, shows_printed: bool, is_live: bool) -> None:
        super().__init__(shows_printed)
        self._tell, self._is_live, self._thread = tell, is_live, threading.get_ident()

    def __exit__(self, *_: object) -> None:
        # R would keep its bar.
        self._pass_on("end")

    def begin(self, text: str, job: Job) -> None:
        self._pass_on("begin", text=text)

    def line(self, text: str) -> None:
        self._show("line", text)

    def phase(self, event: Phase) -> None:
        """Show a phase in R's bar; without one, a line if it lasts."""
        if not (self._is_live and self._pass_on("phase", name=event.name)):
            super().phase(event)

    def step(self, event: StepEnded) -> None:
        if not self._is_live:
            super().step(event)
            return
        names = ("epoch", "epochs", "step", "steps", "rows", "seconds")
        values = {name: getattr(event, name) for name in names}
        self._pass_on("step", **values, loss=event.logs.get("loss"))

    def trials(self, text: str, done: int, total: int) -> None:
        self._show("trials", text, done=done, total=total)

    def ended(self, status: str) -> None:
        self._pass_on("status", status=status)

    def epoch(self, event: EpochEnded, text: str) -> None:
        self._step_lines.end_epoch()
        self._show("epoch", text, epoch=event.epoch, epochs=event.epochs)

    def _show(self, kind: str, text: str, **fields: Any) -> None:
        if not self._pass_on(kind, text=text, **fields):
            super().line(text)

    # R would crash if another thread called it.
    def _pass_on(self, kind: str, **fields: Any) -> bool:
        if threading.get_ident() != self._thread:
            return False
        self._tell(kind, fields)
        return True


# Number of events over which the speed is measured; the very first step is slow.
_RECENT = 20


class Live(Display):
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
        self._progress.stop()

    def begin(self, text: str, job: Job) -> None:
        self._workers = counted(dict(job.roles).get("worker", job.workers), "worker")
        self.line(text)
        self._progress.start()
        # Without a total the bar pulses: the steps of an epoch are not known yet.
        self._task = self._progress.add_task(f"{self._workers}  starting", total=None, values="")

    def line(self, text: str) -> None:
        from rich.text import Text

        # As text: rich would interpret brackets as markup, and colour numbers.
        self._progress.console.print(Text(text), highlight=False, soft_wrap=True)

    def phase(self, event: Phase) -> None:
        if self._task is not None:
            text = f"{self._workers}  {event.name}"
            self._progress.update(self._task, description=text, refresh=True)

    def step(self, event: StepEnded) -> None:
        if self._task is None:
            return
        self._speed.note(event)
        loss = event.logs.get("loss")
        shown = [f"loss {show_loss(loss)}"] if isinstance(loss, float) else []
        values = [f"step {event.step}/{event.steps}", *shown, *self._speed.describe(event)]
        self._progress.update(
            self._task,
            description=f"{self._workers}  epoch {event.epoch}/{event.epochs}",
            completed=event.step,
            total=event.steps,
            values="  ".join(values),
            refresh=True,
        )

    def epoch(self, event: EpochEnded, text: str) -> None:
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
    """Speed of the last steps that events showed."""

    def __init__(self) -> None:
        self._recent: deque[StepEnded] = deque(maxlen=_RECENT)

    def note(self, event: StepEnded) -> None:
        self._recent.append(event)

    def end_epoch(self) -> None:
        self._recent.clear()

    def describe(self, event: StepEnded) -> list[str]:
        """Return rows per second and the remaining time; empty after only one event."""
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


def relayed_to(tell: Tell) -> AbstractContextManager[None]:
    """Have ``tell`` show the progress of all calls within this context."""
    return holding(_teller, tell)


def choose_lines(verbose: int) -> Display:
    """Return a display: 0 shows nothing, 1 epochs and notes, 2 also the lines of workers."""
    if verbose == 0:
        return Silent(False)
    tell, shows_printed = _teller.get(), verbose > 1
    return Display(shows_printed) if tell is None else Relay(tell, shows_printed, False)


def choose_display(job: Job) -> Display:
    if job.verbose == 0 or job.kind != "train":
        return choose_lines(job.verbose)
    tell, shows_printed = _teller.get(), job.verbose > 1
    if tell is not None:
        return Relay(tell, shows_printed, bool(tell("is_live", {})))
    return Live(shows_printed) if _is_live() else Display(shows_printed)


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
