"""Run a prepared training: restart it, receive its files, and make its result."""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from pybackend.core.api import training_hooks
from pybackend.core.api.calls import TrainingCall
from pybackend.core.api.checkpoints import has_checkpoint
from pybackend.core.api.display import printer
from pybackend.core.api.observer import recording
from pybackend.core.api.prepared_training import PreparedTraining, prepare_training
from pybackend.core.api.request import Timeline
from pybackend.core.api.result_files import Decoder
from pybackend.core.api.train_result import TrainResult
from pybackend.core.data.columns import TableRows
from pybackend.core.errors import ClusterError, InputError, WorkerFailedError
from pybackend.core.job.arguments import is_uri
from pybackend.core.job.job import TRAINED, WEIGHTS, TrainingJob
from pybackend.core.job.messages import Emit, EpochEnded, Event, EventBytes, Note, Resumed
from pybackend.core.job.report import Restart, WorkerReport, read_metrics
from pybackend.core.job.storage_options import pointing_to
from pybackend.core.launchers import Outcome
from pybackend.core.model.serialization import sha256_of
from pybackend.core.tf_config import ranks_of
from pybackend.core.words import call_of, show

Complete = Callable[[TrainResult], TrainResult]
# Attributes of a result that are those of the job, and of the outcome.
_OF_JOB = ("model_uri", "seed", "tensorboard", "initial_epoch", "validation_freq")
_OF_OUTCOME = ("generations", "restarts", "timeline")


def run_training(call: TrainingCall, complete: Complete = lambda result: result) -> TrainResult:
    """Make a call of `barrier_train`; ``complete`` adds to the result before trackers record it."""
    return run_prepared(prepare_training(call), complete=complete)


def show_notes(prepared: PreparedTraining) -> Emit:
    """Show what the caller must know before the start; return the function that shows notes."""
    say = printer(prepared.job.verbose)
    for note in prepared.notes:
        say(note)
    return say


def run_prepared(
    prepared: PreparedTraining,
    say: Emit | None = None,
    listen: Emit = lambda event: None,
    complete: Complete = lambda result: result,
) -> TrainResult:
    """Run a checked training, and return the result.

    ``say`` shows notes about the whole run; None: depending on ``verbose``, after the first ones.
    ``listen`` receives the workers' events.
    """
    say, checkpoint = say or show_notes(prepared), prepared.job.checkpoint
    files = EventFiles(prepared.job.tensorboard, say)
    # Around all else: whatever fails also ends the run in the tracking system.
    with recording(prepared, say) as record:
        parts = _Parts(prepared.began)
        with files, pointing_to(checkpoint, partial(has_checkpoint, checkpoint)):
            outcome = run_with_restarts(prepared, say, parts, files, record, listen)
            result = complete(_make_result(prepared, outcome, parts))
        for hook in training_hooks():
            hook.note(prepared, result)
        files.conclude()
        record.finish(result)
    return result


class _Parts:
    """Times at which the parts of a call begin, from the events that arrive in this session."""

    def __init__(self, began: float) -> None:
        self._began = {"prepare": began, "start": time.monotonic()}

    def __call__(self, event: Event) -> None:
        if isinstance(event, EpochEnded):
            now = time.monotonic()
            self._began.setdefault("epochs", max(now - event.seconds, self._began["start"]))
            self._began["finish"] = now

    def measure(self) -> dict[str, float]:
        """Return the seconds of each part; the last one ends now."""
        times = [*self._began.values(), time.monotonic()]
        return {
            name: ended - began
            for name, (began, ended) in zip(self._began, pairwise(times), strict=True)
        }


def _make_result(prepared: PreparedTraining, outcome: Outcome, parts: _Parts) -> TrainResult:
    job = outcome.job if isinstance(outcome.job, TrainingJob) else prepared.job
    first, trained_on = outcome.reports[0], prepared.datasets["train"]
    kind, content, digest = _check_model(outcome, job.model_uri)
    history, seconds = read_metrics(first, list), parts.measure()
    lists: dict[str, Any] = {name: list(getattr(outcome, name)) for name in _OF_OUTCOME}
    decode = Decoder(
        kind,
        digest,
        prepared.custom_objects,
        job.safe_mode,
        first.inputs,
        # Only weights came back: the model is built again to load them.
        make_copy=prepared.snapshot or (prepared.model if kind == WEIGHTS else None),
        weights=str(first.weights_sha256),
        checkpoint=job.checkpoint,
        verbose=job.verbose,
    )
    return TrainResult(
        content=content,
        model_format=kind,
        model_sha256=digest,
        history=history,
        workers=_list_workers(job, outcome.reports),
        seconds=sum(seconds.values()),
        parts=seconds,
        epochs=max(map(len, history.values()), default=0),
        inputs=first.inputs,
        settings=prepared.settings,
        decode=decode,
        **(trained_on.summary if isinstance(trained_on, TableRows) else {}),
        **{name: getattr(job, name) for name in _OF_JOB},
        **lists,
    )


def _list_workers(job: TrainingJob, reports: Sequence[WorkerReport]) -> list[WorkerReport]:
    """Return the reports as in a result: the chief reports the steps of asynchronous workers."""
    steps = dict(zip(ranks_of(job.roles, "worker"), reports[0].by_worker, strict=False))
    return [
        replace(one, value=None, inputs=None, by_worker=(), steps=steps.get(one.rank, one.steps))
        for one in reports
    ]


def _check_model(outcome: Outcome, uri: str | None) -> tuple[str, bytes, str]:
    """Return the model's format, content and SHA-256, if all workers have the same weights.

    The content is empty if the model was written to a URI.
    """
    if len({report.weights_sha256 for report in outcome.reports} - {None}) > 1:
        raise ClusterError(
            "the workers' weights differ after training: a custom callback, layer or train_step "
            "changed them on one worker and not on the others"
        )
    if uri is not None:
        kind = max((kind for kind in TRAINED if uri.endswith(f".{kind}")), key=len)
        return kind, b"", str(outcome.reports[0].model_sha256)
    if outcome.model is None:
        raise ClusterError(
            "the trained model did not arrive from worker 0, as the connection to it is too slow "
            "or failed: set `uri` of `model_options`"
        )
    kind, content = outcome.model
    digest = sha256_of(content)
    if digest != outcome.reports[0].model_sha256:
        raise ClusterError("the model was altered in transit from worker 0: train again")
    return kind, content, digest


def run_with_restarts(prepared: PreparedTraining, say: Emit, *listeners: Emit) -> Outcome:
    """Run a training run; if a worker is lost, run it again from the newest checkpoint.

    After the first run, an error at the start is also retried: a host may be rebooting. An error of
    the code that a worker ran is not. ``say`` receives a note about each restart, and ``listeners``
    the events of all runs. The outcome is that of the last run, with a record of all restarts.
    """
    checkpoint, restarts = prepared.job.checkpoint, prepared.recovery.restarts
    is_kept = checkpoint is not None
    where = "the newest checkpoint" if is_kept else "the beginning"
    losses: list[Restart] = []
    timeline = Timeline()

    def note(event: Event) -> None:
        if isinstance(event, Resumed) and losses:
            losses[-1] = replace(losses[-1], checkpoint=event.place)

    def run() -> Outcome:
        outcome = prepared.run(prepared.launcher, note, *listeners, timeline=timeline)
        return replace(outcome, restarts=tuple(losses))

    for number in range(1, restarts + 1):
        try:
            return run()
        except (WorkerFailedError, ClusterError) as error:
            is_loss = isinstance(error, WorkerFailedError) and error.is_loss(is_kept=is_kept)
            if not is_loss and (isinstance(error, WorkerFailedError) or number == 1):
                raise
            lost = str(error).partition("\n")[0]
            losses.append(Restart(time.time(), lost))
            say(Note(f"{lost}; restarting from {where} (restart {number} of {restarts})"))
        if not is_loss:
            time.sleep(prepared.recovery.pause * (number - 1))
        if checkpoint is not None:
            resuming = replace(checkpoint, resume=True)
            prepared = replace(prepared, job=replace(prepared.job, checkpoint=resuming))
    return run()


class EventFiles:
    """Write the event files of a training run to a folder on this machine.

    ``folder`` is an absolute path, or a URI to which rank 0 writes directly; None: no files.
    ``say`` receives notes: the location of the files when the first arrives, and what is missing at
    the end.
    """

    def __init__(self, folder: str | None, say: Emit) -> None:
        self._say = say
        self._heard: set[int] = set()
        self._folder = None if folder is None or is_uri(folder) else Path(folder)
        self._is_complete: bool | None = None
        self._error: OSError | ValueError | None = None
        self._made: list[Path] = []
        if self._folder is not None:
            self._made = [p for p in (self._folder, *self._folder.parents) if not p.exists()]
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                call = call_of("track_tensorboard", ...)
                raise InputError(
                    f"`folder` of {call}: {show(folder)} cannot be written: {error}"
                ) from error

    def __call__(self, event: Event) -> None:
        self._heard.add(event.rank)
        if not isinstance(event, EventBytes) or self._folder is None:
            return
        if self._is_complete is None:
            self._say(Note(f"run `tfdist tensorboard {self._folder}` to view this training run"))
        self._is_complete = event.is_last
        if event.name and self._error is None:
            try:
                self._write(self._folder, event)
            # A full disk or corrupted bytes must not end the training.
            except (OSError, ValueError) as error:
                self._error = error

    def __enter__(self) -> EventFiles:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # removes only new folders that are empty
            for folder in self._made:
                folder.rmdir()

    def conclude(self) -> None:
        if self._folder is None:
            return
        if self._error is not None:
            text = f"TensorBoard's files could not be written to {self._folder}: {self._error}"
            self._say(Note(text))
        # Among processes that join, only the first receives events of rank 0, and has the files.
        elif not self._is_complete and (not self._heard or 0 in self._heard):
            call = call_of("track_tensorboard", "s3://bucket/logs")
            text = (
                f"TensorBoard's files in {self._folder} are incomplete: worker 0 had no connection "
                f"to this process while it trained. Pass a URI that it can write to: {call}"
            )
            self._say(Note(text))

    @staticmethod
    def _write(folder: Path, event: EventBytes) -> None:
        name = PurePosixPath(event.name)
        if name.is_absolute() or ".." in name.parts:
            raise OSError(f"a worker sent a file with the invalid name {show(event.name)}")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not appended: in a new generation a worker sends its files from their beginning.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.seek(event.start)
            file.write(base64.b64decode(event.data, validate=True))
