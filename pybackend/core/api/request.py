"""A request: the checked and encoded arguments of a call, and how it is run."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Generic, cast

from pybackend.core.api import call_data, sent_objects
from pybackend.core.api.calls import (
    Kind,
    ModelCall,
    PredictionCall,
    TrainingCall,
    read_keras_defaults,
)
from pybackend.core.api.display import Narrator, choose_display, describe_start, log_start
from pybackend.core.api.model_columns import choose_columns
from pybackend.core.api.observer import Observers, split_observers
from pybackend.core.data.batches import Batches
from pybackend.core.data.columns import ColumnSpec, TableRows
from pybackend.core.data.files import naming_open_files
from pybackend.core.data.sources import FileRows, FunctionRows
from pybackend.core.errors import Failure, Moment, WorkerFailedError
from pybackend.core.job.job import (
    LOGGER,
    MODEL_OBJECTS,
    SOURCE,
    Job,
    TrainingJob,
    argument_of,
    code_classes,
)
from pybackend.core.job.messages import Answer, Emit, Event, Phase, Phases
from pybackend.core.job.pickling import pickle_value
from pybackend.core.job.storage_options import check_data_options, check_model_options
from pybackend.core.launchers import Checking, DataSets, Files, Launcher, Outcome

_READ_BY_WORKERS = (FileRows, FunctionRows)
# Features whose names are sent with a job.
_MOST_NAMES = 1000
# Calls on several threads may share a model, and Keras's settings are global.
_encoding = threading.RLock()
# Times after the start at which it is shown that no worker has answered yet.
_STARTING_SECONDS = (10.0, 60.0, 300.0)
# A worker has about ten; one that is started again and again must not fill the memory.
_MOST_MOMENTS = 1000
_OF_A_WORKER = 20


@dataclass(frozen=True)
class Request(Generic[Kind]):
    """A checked request.

    Attributes
    ----------
    job, files, datasets
        Arguments of a launcher; the data sets still include those that workers read themselves.
    model
        A Keras model, or the function that builds it.
    custom_objects
        Those that were passed, and those that were found in the model.
    snapshot
        Returns a copy of the model as it was sent, if it was pickled.
    described
        Result of `describe_model`, if the model itself is not in this process.
    """

    job: Kind
    files: Mapping[str, bytes]
    datasets: Mapping[str, Any]
    columns: ColumnSpec
    model: Any
    custom_objects: Mapping[str, Any]
    snapshot: Callable[[], Any] | None
    observers: Observers = field(default_factory=Observers)
    described: str | None = None

    def describe_model(self) -> str:
        if self.described is not None:
            return self.described
        if self.job.model_source == "function":
            return f"{getattr(self.model, '__name__', 'a function')}() is called on each worker"
        size = sum(map(len, self.files.values()))
        way = "pickled, with its callbacks" if MODEL_OBJECTS in self.files else "as a Keras file"
        parameters = self.model.count_params() if self.model.built else None
        counted = "" if parameters is None else f" with {parameters:,} parameters"
        return f"{self.model.name}{counted}, sent {way}: {size / 1e3:,.0f} kB for each worker"

    def run(
        self, launcher: Launcher, *listeners: Emit, timeline: Timeline | None = None
    ) -> Outcome:
        """Run the job to completion, and show its progress.

        ``listeners`` also receive all events. ``timeline`` is that of earlier runs in the same
        call.
        """
        read = {k: v for k, v in self.datasets.items() if isinstance(v, _READ_BY_WORKERS)}
        sent = {k: call_data.columns_of(v) for k, v in self.datasets.items() if k not in read}
        sources = {
            f"{name}{SOURCE}": pickle_value(data, f"`{argument_of(name)}`")
            for name, data in read.items()
            if isinstance(data, FileRows)
        }
        if isinstance(launcher, Checking):
            launcher.check(self.job)
        files = {**self.files, **sources}
        with (
            naming_open_files(),
            following(launcher, self.job, self.observers, *listeners) as (job, on_event),
        ):
            return (timeline or Timeline()).launch(launcher, job, files, sent, on_event)


def prepare(
    kind: type[Kind],
    call: ModelCall,
    read: Callable[[ColumnSpec, Kind], Mapping[str, Any]],
    as_file: bool = False,
) -> Request[Kind]:
    """Check the arguments of a call, and encode them for the workers.

    Cheap checks come first, so that a wrong argument is reported before TensorFlow is loaded.
    ``read`` checks the data, given the columns and the job, and returns the data sets by name. With
    ``as_file``, the model must be a Keras file. A model that cannot be encoded raises a
    `SerializationError`.
    """
    job = replace(
        call.make_job(kind),
        in_memory=check_data_options(call.options["data_options"]).in_memory,
        model_source=sent_objects.find_source(call.model),
    )
    columns = choose_columns(call)
    given = call.options["callbacks"] if isinstance(call, TrainingCall) else None
    observers, callbacks = split_observers(given)
    if isinstance(call, TrainingCall):
        sent_objects.check_callbacks(callbacks, job)
        for name, data in call.data_arguments.items():
            sent_objects.check_shared_state(data, name, callbacks)
    datasets = read(columns, job)
    if isinstance(job, TrainingJob):
        job = cast("Kind", _resolve_training(job, datasets["train"]))
    if not isinstance(call, PredictionCall):
        call_data.check_columns_exist(call, datasets)
    with _encoding:
        model = call.find_model()
        custom_objects = check_model_options(call.options["model_options"]).custom_objects or {}
        source, rows = model, None
        if job.model_source == "file":
            from pybackend.core.model.view import ModelView

            source = ModelView(model)
            job = replace(job, **read_keras_defaults())  # a result's model may have loaded Keras
            custom_objects = sent_objects.add_custom_objects(source, custom_objects)
            rows = call_data.check_rows_fit(model, datasets, job)
        else:
            job = replace(job, feature_names=_list_features(datasets.get("train")))
        files = sent_objects.encode_model(
            source, custom_objects, job, callbacks, as_file, rows, datasets
        )
        snapshot = None
        if isinstance(job, TrainingJob) and MODEL_OBJECTS in files:
            from pybackend.core.model.by_value import take_snapshot

            snapshot = take_snapshot(model)
    seen = Observers(observers)
    return Request(job, files, datasets, columns, model, custom_objects, snapshot, seen)


def _resolve_training(job: TrainingJob, data: Any) -> TrainingJob:
    """Return the job with the steps that a data set of batches has, and class weights by code."""
    if isinstance(data, Batches):
        job = data.adapt(job)
    job = code_classes(job, data.summary["levels"] if isinstance(data, TableRows) else None)
    call_data.check_classes_occur(job, data)
    return job


def _list_features(data: Any) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
    """Return the names of a table's features, unless they are too many to be read."""
    names = data.feature_names if isinstance(data, TableRows) else {}
    if sum(len(one or ()) for one in names.values()) > _MOST_NAMES:
        return ()
    return tuple((name, one if one is None else tuple(one)) for name, one in names.items())


@contextmanager
def following(
    launcher: Launcher, job: Job, observers: Observers, *listeners: Emit
) -> Iterator[tuple[Job, Emit]]:
    """Show a job's progress, and pass it to observers and listeners, while the context is active.

    Yields the job, set to report the required events, and the function that receives them.
    """
    display = choose_display(job)
    are_seen = display.shows_steps or observers.see_steps or LOGGER.isEnabledFor(logging.DEBUG)
    # Asynchronous steps have no order that all workers share.
    has_order = isinstance(job, TrainingJob) and not job.is_asynchronous
    job = replace(job, reports_steps=has_order and are_seen, is_observed=bool(observers))
    show = Narrator(display)
    # Until the first worker runs, nothing is heard: a cluster may compute a table first.
    starting = Phases(show, _STARTING_SECONDS)

    def on_event(event: Event) -> Answer | None:
        starting.end()
        for listen in listeners:
            listen(event)
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
        # Else its timer would show the phase after an error.
        finally:
            starting.end()


class Timeline:
    """Record of what the workers of a call did and when, with all restarts."""

    def __init__(self) -> None:
        self._moments: deque[Moment] = deque()

    def list(self) -> list[Moment]:
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
            # A new error has the timeline; the traceback is still that of the failure.
            found = WorkerFailedError(error.failures, error.values, self.list())
            raise found.with_traceback(error.__traceback__) from error.__cause__
        return replace(outcome, timeline=tuple(self.list()))


def _describe_end(failure: Failure) -> Moment:
    state = "stopped" if failure.exception_type == "Stopped" else "failed"
    reason = failure.message.partition("\n")[0] or failure.exception_type
    return Moment(failure.time, state, reason, failure.rank, failure.host)
