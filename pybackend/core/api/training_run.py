"""Run a prepared training: restart it, receive its files, and make its result."""

from __future__ import annotations

import base64
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from pybackend.core.api import training_hooks
from pybackend.core.api.call_data import note_index
from pybackend.core.api.calls import TrainingCall
from pybackend.core.api.checkpoints import has_checkpoint
from pybackend.core.api.display import printer
from pybackend.core.api.observer import list_callbacks, recording
from pybackend.core.api.prepared_training import PreparedTraining, prepare_training
from pybackend.core.api.request import Request, Timeline
from pybackend.core.api.result_files import Decoder, read_model_file
from pybackend.core.api.train_result import TrainResult
from pybackend.core.data.columns import TableRows
from pybackend.core.errors import ClusterError, InputError, WorkerFailedError
from pybackend.core.job.arguments import is_uri
from pybackend.core.job.job import TRAINED, WEIGHTS, TrainingJob
from pybackend.core.job.messages import Emit, EpochEnded, Event, EventBytes, Note, Resumed
from pybackend.core.job.report import Restart, WorkerReport, read_metrics
from pybackend.core.job.storage_options import Recovery, pointing_to
from pybackend.core.launchers import Launcher, Outcome
from pybackend.core.model.serialization import sha256_of
from pybackend.core.tf_config import ranks_of
from pybackend.core.words import call_of, show

Complete = Callable[[TrainResult], TrainResult]
# The attribute that holds the path, by the name of the class.
_PATHS = {"ModelCheckpoint": "filepath", "CSVLogger": "filename", "TensorBoard": "log_dir"}


def run_training(call: TrainingCall, complete: Complete = lambda result: result) -> TrainResult:
    """Make a call of `barrier_train`; ``complete`` adds to the result before trackers record it."""
    began = time.monotonic()
    return complete_training(call, prepare_training(call), began, complete)


def complete_training(
    call: TrainingCall,
    prepared: PreparedTraining,
    began: float,
    complete: Complete = lambda result: result,
) -> TrainResult:
    """Run a prepared call, which began at this ``time.monotonic()``, and return the result."""
    return run_prepared(prepared, began, note_start(prepared, call), complete=complete)


def note_start(prepared: PreparedTraining, call: TrainingCall) -> Emit:
    """Show what the caller must know before the start; return the function that shows notes."""
    say = printer(prepared.request.job.verbose)
    if (note := note_files(call.options["callbacks"], prepared.launcher)) is not None:
        say(note)
    for note in note_index(prepared.request.datasets):
        say(note)
    return say


def run_prepared(
    prepared: PreparedTraining,
    began: float,
    say: Emit,
    listen: Emit = lambda event: None,
    complete: Complete = lambda result: result,
) -> TrainResult:
    """Run a checked training that began at this ``time.monotonic()``, and return the result.

    ``say`` shows notes about the whole run, and ``listen`` receives the workers' events.
    """
    request, checkpoint = prepared.request, prepared.request.job.checkpoint
    files = EventFiles(request.job.tensorboard, say)
    # Around all else: whatever fails also ends the run in the tracking system.
    with recording(prepared, say) as record:
        parts = _Parts(began, files, record, listen)
        with files, pointing_to(checkpoint, partial(has_checkpoint, checkpoint)):
            outcome = run_with_restarts(request, prepared.launcher, prepared.recovery, parts, say)
            result = complete(_make_result(prepared, outcome, parts))
        for hook in training_hooks():
            hook.note(request, result)
        files.conclude()
        record.finish(result)
    return result


class _Parts:
    """Times at which the parts of a call begin, from the events that arrive in this session."""

    def __init__(self, began: float, *listeners: Emit) -> None:
        self._began = {"prepare": began, "start": time.monotonic()}
        self._listeners = listeners

    def __call__(self, event: Event) -> None:
        if isinstance(event, EpochEnded):
            now = time.monotonic()
            self._began.setdefault("epochs", max(now - event.seconds, self._began["start"]))
            self._began["finish"] = now
        for listen in self._listeners:
            listen(event)

    def measure(self) -> dict[str, float]:
        """Return the seconds of each part; the last one ends now."""
        times = [*self._began.values(), time.monotonic()]
        return {
            name: ended - began
            for name, (began, ended) in zip(self._began, pairwise(times), strict=True)
        }


def _make_result(prepared: PreparedTraining, outcome: Outcome, parts: _Parts) -> TrainResult:
    request = prepared.request
    job = outcome.job if isinstance(outcome.job, TrainingJob) else request.job
    trained_on = request.datasets["train"]
    kind, content, digest = _check_model(outcome, job.model_uri)
    history = read_metrics(outcome.reports[0], list)
    inputs, weights = outcome.reports[0].inputs, str(outcome.reports[0].weights_sha256)
    # Not the request itself: its data must not live as long as the result.
    make_copy, custom_objects = request.snapshot, request.custom_objects
    # Only weights came back: the model is built again to load them.
    if kind == WEIGHTS:
        make_copy = make_copy or request.model

    decode = Decoder(
        kind=kind,
        digest=digest,
        make_copy=make_copy,
        custom_objects=custom_objects,
        safe_mode=job.safe_mode,
        inputs=inputs,
        weights=weights,
        checkpoint=job.checkpoint,
        verbose=job.verbose,
    )
    seconds = parts.measure()
    return TrainResult(
        content=content,
        model_format=kind,
        model_uri=job.model_uri,
        **(trained_on.summary if isinstance(trained_on, TableRows) else {}),
        model_sha256=digest,
        history=history,
        workers=_list_workers(job, outcome.reports),
        seconds=sum(seconds.values()),
        parts=seconds,
        seed=job.seed,
        epochs=max(map(len, history.values()), default=0),
        inputs=inputs,
        generations=list(outcome.generations),
        restarts=list(outcome.restarts),
        timeline=list(outcome.timeline),
        tensorboard=job.tensorboard,
        settings=prepared.settings,
        initial_epoch=job.initial_epoch,
        validation_freq=job.validation_freq,
        fetch=read_model_file,
        decode=decode,
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


def run_with_restarts(
    request: Request[TrainingJob],
    launcher: Launcher,
    recovery: Recovery,
    listen: Emit = lambda event: None,
    say: Emit | None = None,
) -> Outcome:
    """Run a training run; if a worker is lost, run it again from the newest checkpoint.

    After the first run, an error at the start is also retried: a host may be rebooting. An error of
    the code that a worker ran is not. ``listen`` receives the events of all runs, ``say`` a note
    about each restart; None: as ``verbose`` of the job says. The outcome is that of the last run,
    with a record of all restarts.
    """
    show, checkpoint = say or printer(request.job.verbose), request.job.checkpoint
    is_kept = checkpoint is not None
    where = "the newest checkpoint" if is_kept else "the beginning"
    losses: list[Restart] = []
    timeline = Timeline()
    restarts = recovery.restarts

    def note(event: Event) -> None:
        if isinstance(event, Resumed) and losses:
            losses[-1] = replace(losses[-1], checkpoint=event.place)
        listen(event)

    def run() -> Outcome:
        outcome = request.run(launcher, note, timeline)
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
            show(Note(f"{lost}; restarting from {where} (restart {number} of {restarts})"))
        if not is_loss:
            time.sleep(recovery.pause * (number - 1))
        if checkpoint is not None:
            resuming = replace(checkpoint, resume=True)
            request = replace(request, job=replace(request.job, checkpoint=resuming))
    return run()


def note_files(callbacks: Any, launcher: Launcher) -> Note | None:
    """Return a note if files with relative paths will not be in this session's folder."""
    found = [file for one in list_callbacks(callbacks) for file in _relative_paths(one)]
    if launcher.is_here or not found:
        return None
    return Note(
        f"{', '.join(found)}: worker 0 writes into its own folder on its host. Use an absolute "
        "path on storage that this session can read; or use the result's `history`, `checkpoint`, "
        "or early stopping with `restore_best_weights`"
    )


def _relative_paths(callback: Any) -> Iterator[str]:
    for kind in (kind.__name__ for kind in type(callback).__mro__ if kind.__name__ in _PATHS):
        path = getattr(callback, _PATHS[kind], None)  # None: another class of that name
        text = os.fspath(path) if isinstance(path, (str, os.PathLike)) else None
        if text is not None and not os.path.isabs(text) and "://" not in text:
            yield f"{kind}({show(text)})"


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
        if (text := self._describe_loss()) is not None:
            self._say(Note(text))

    def _describe_loss(self) -> str | None:
        if self._folder is None:
            return None
        if self._error is not None:
            return f"TensorBoard's files could not be written to {self._folder}: {self._error}"
        # Among processes that join, only the first receives events of rank 0, and has the files.
        if self._is_complete or (self._heard and 0 not in self._heard):
            return None
        return (
            f"TensorBoard's files in {self._folder} are incomplete: worker 0 had no connection to "
            f"this process while it trained. Pass a URI that it can write to: "
            f"{call_of('track_tensorboard', 's3://bucket/logs')}"
        )

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
