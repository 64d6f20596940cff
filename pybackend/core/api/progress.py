"""Show a running job's progress in the session, and answer its workers."""

from __future__ import annotations

import logging
import math
import socket
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pybackend.core.api.display import Display, choose_display, choose_lines
from pybackend.core.api.observer import Observers
from pybackend.core.errors import Failure, Moment, WorkerFailedError
from pybackend.core.job.job import LOGGER, Job, TrainingJob
from pybackend.core.job.messages import (
    Answer,
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
from pybackend.core.launchers import DataSets, Files, Launcher, Outcome
from pybackend.core.tf_config import describe_processes
from pybackend.core.words import show_loss, term

# Times after the start at which it is shown that no worker has answered yet.
_STARTING_SECONDS = (10.0, 60.0, 300.0)
# Workers that wait for the same one report it within seconds, then not again for a minute.
_RECENT_SECONDS = 20.0
# A worker has about ten; one that is started again and again must not fill the memory.
_MOST_MOMENTS = 1000
_OF_A_WORKER = 20
_NO_NUMBER = (
    "the loss became NaN or infinite: look for missing or infinite values in the features, or "
    "lower the learning rate. {} in `callbacks` stops training when this happens"
)
_Shown = EpochEnded | StepEnded | Note | Waits | PrintedLine


@contextmanager
def following(launcher: Launcher, job: Job, observers: Observers) -> Iterator[tuple[Job, Emit]]:
    """Show a job's progress, and pass it to observers, while the context is active.

    Yields
    ------
    tuple
        The job, set to report the required events, and the function that receives them.
    """
    display = choose_display(job)
    job = replace(
        job,
        reports_steps=_is_seen_by_step(job, display, observers),
        is_observed=bool(observers),
    )
    show = Narrator(display)
    # Until the first worker runs, nothing is heard: a cluster may compute a table first.
    starting = Phases(show, _STARTING_SECONDS)

    def on_event(event: Event) -> Answer | None:
        starting.end()
        show(event)
        return observers(event)

    with display:
        if job.kind == "train":
            text = describe_start(launcher, job)
            log_start(text)
            display.begin(text, job)
            starting(Phase("starting"))
        try:
            yield job, on_event
        finally:
            starting.end()


class Timeline:
    """Record of what the workers of a call did and when, with all restarts."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque()

    def list(self) -> list[Moment]:
        """Return the latest moments by worker and time."""
        return sorted(self._moments, key=lambda moment: (moment.rank, moment.time))

    def launch(
        self, launcher: Launcher, job: Job, files: Files, datasets: DataSets, on_event: Emit
    ) -> Outcome:
        """Run a job as `Launcher.launch`; the outcome, or the error, has the timeline."""
        most = max(_MOST_MOMENTS, _OF_A_WORKER * job.most_workers)
        self._moments = deque(self._moments, most)

        def hear(event: Event) -> object:
            if isinstance(event, Moment):
                self._moments.append(event)
            return on_event(event)

        try:
            outcome = launcher.launch(job, files, datasets, hear)
        except WorkerFailedError as error:
            # A launcher has reported the losses that the training could have survived.
            known = {(moment.rank, moment.time) for moment in self._moments}
            ends = map(_describe_end, error.failures)
            self._moments += [one for one in ends if (one.rank, one.time) not in known]
            trace = error.__traceback__
            found = WorkerFailedError(error.failures, error.values, self.list())
            raise found.with_traceback(trace) from error.__cause__
        return replace(outcome, timeline=tuple(self.list()))


def _describe_end(failure: Failure) -> Moment:
    state = "stopped" if failure.exception_type == "Stopped" else "failed"
    reason = failure.message.partition("\n")[0] or failure.exception_type
    return Moment(failure.time, state, reason, failure.rank, failure.host)


def printer(verbose: int) -> Emit:
    """Return a function that shows events: 0 none, 1 epochs and notes, 2 also workers' lines."""
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


def _is_seen_by_step(job: Job, display: Display, observers: Observers) -> bool:
    is_seen = display.shows_steps or observers.see_steps or logs_steps()
    # Asynchronous steps have no order that all workers share.
    return isinstance(job, TrainingJob) and not job.is_asynchronous and is_seen


class Narrator:
    """Write events as text to a display and, unless ``logs`` is False, to Python's logging."""

    def __init__(self, display: Display, logs: bool = True) -> None:
        self._display = display
        self._log = log_event if logs else lambda event, text: None
        self._waits = _Waits()
        self._is_finite = True

    def __call__(self, event: Event) -> None:
        # All ranks report the same epochs and notes.
        is_first = event.rank == 0
        if isinstance(event, PrintedLine):
            self._log(event, event.text)
            self._display.printed(f"[{event.rank}] {event.text}")
        elif isinstance(event, Waits):
            if text := self._waits.describe(event):
                self._note(event, text)
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

    def _note(self, event: EpochEnded | Note | Waits, text: str) -> None:
        self._log(event, text)
        self._display.line(f"note: {text}")


class _Waits:
    """Find the worker that all others are waiting for."""

    def __init__(self) -> None:
        self._heard: dict[int, float] = {}
        self._named: dict[int, float] = {}

    def describe(self, event: Waits) -> str | None:
        """Return a note; None for a worker that is itself waiting, or was named recently."""
        now = time.monotonic()
        self._heard[event.rank] = now
        waits_too = now - self._heard.get(event.peer, -_RECENT_SECONDS) < _RECENT_SECONDS
        was_named = now - self._named.get(event.peer, -_RECENT_SECONDS) < _RECENT_SECONDS
        if not event.is_second or waits_too or was_named:
            return None
        self._named[event.peer] = now
        return (
            f"waiting for worker {event.peer} for {event.seconds:.0f} s (alive: loading data, "
            "computing, or in a callback)"
        )


def logs_steps() -> bool:
    """Return whether the logger's level is low enough to include steps."""
    return LOGGER.isEnabledFor(logging.DEBUG)


def log_start(text: str) -> None:
    """Log that this machine is starting workers."""
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
