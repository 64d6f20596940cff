"""A request: the checked and encoded arguments of a call."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar, cast

from pybackend.core.api.calls import ModelCall, PredictionCall, TrainingCall
from pybackend.core.api.data_checks import (
    HELD_AS_COLUMNS,
    check_classes_occur,
    check_columns_exist,
    check_rows_fit,
)
from pybackend.core.api.model import (
    add_custom_objects,
    check_callbacks,
    encode_model,
    find_source,
)
from pybackend.core.api.model_columns import choose_columns
from pybackend.core.api.observer import Observers, split_observers
from pybackend.core.api.progress import Timeline, following
from pybackend.core.api.result import TrainResult
from pybackend.core.api.settings import read_keras_defaults
from pybackend.core.api.shared_state import check_shared_state
from pybackend.core.data.columns import ColumnSpec, TableRows
from pybackend.core.data.datasets import Batches
from pybackend.core.data.disk import naming_open_files
from pybackend.core.data.sources import FileRows, FunctionRows
from pybackend.core.job.job import (
    MODEL_OBJECTS,
    SOURCE,
    ModelJob,
    TrainingJob,
    argument_of,
    code_classes,
    make_job,
)
from pybackend.core.job.messages import Emit, Event
from pybackend.core.job.pickling import pickle_value
from pybackend.core.job.storage_options import check_data_options, check_model_options
from pybackend.core.launchers import Checking, Launcher, Outcome

_READ_BY_WORKERS = (FileRows, FunctionRows)
Kind = TypeVar("Kind", bound=ModelJob)
# Features whose names are sent with a job.
_MOST_NAMES = 1000
# Calls on several threads may share a model, and Keras's settings are global.
_encoding = threading.RLock()


@dataclass(frozen=True)
class Request(Generic[Kind]):
    """A checked request.

    Attributes
    ----------
    job, files, datasets
        Arguments of a launcher; the data sets still include those that workers read themselves.
    columns
        The columns used, and their roles.
    model
        A Keras model, or the function that builds it.
    custom_objects
        Those that were passed, and those that were found in the model.
    snapshot
        Returns a copy of the model as it was sent, if it was pickled.
    observers
        Observers of the training in this session.
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
    observers: Observers
    described: str | None = None

    def describe_model(self) -> str:
        """Describe the model, and how it is sent to the workers."""
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
        self,
        launcher: Launcher,
        listen: Emit = lambda event: None,
        timeline: Timeline | None = None,
    ) -> Outcome:
        """Run the job to completion, and show its progress.

        Parameters
        ----------
        listen
            Also receives all events.
        timeline
            The timeline of earlier runs in the same call.
        """
        read = {k: v for k, v in self.datasets.items() if isinstance(v, _READ_BY_WORKERS)}
        sent = {
            name: data.columns if isinstance(data, HELD_AS_COLUMNS) else data
            for name, data in self.datasets.items()
            if name not in read
        }
        files = {**self.files, **_encode_files(read)}
        if isinstance(launcher, Checking):
            launcher.check(self.job)
        with naming_open_files(), following(launcher, self.job, self.observers) as (job, show):

            def on_event(event: Event) -> object:
                listen(event)
                return show(event)

            return (timeline or Timeline()).launch(launcher, job, files, sent, on_event)


def prepare(
    kind: type[Kind],
    call: ModelCall,
    read: Callable[[ColumnSpec, Kind], Mapping[str, Any]],
    as_file: bool = False,
) -> Request[Kind]:
    """Check the arguments of a call, and encode them for the workers.

    Cheap checks come first, so that a wrong argument is reported before TensorFlow is loaded.

    Parameters
    ----------
    kind
        Class of the job.
    read
        Checks the data, given the columns and the job; returns the data sets by name.
    as_file
        True if the model must be a Keras file.

    Raises
    ------
    InputError
        An argument is invalid. The message names it.
    SerializationError
        The model cannot be encoded.
    """
    given = call.model
    result = given if isinstance(given, TrainResult) else None
    options = check_data_options(call.options.get("data_options"))
    job = replace(
        make_job(kind, call.arguments),
        in_memory=options.in_memory,
        model_source=find_source(given),
        **read_keras_defaults(),
    )
    columns = choose_columns(call, options, result)
    observers, callbacks = split_observers(
        call.options["callbacks"] if isinstance(call, TrainingCall) else None
    )
    check_callbacks(callbacks, job)
    if isinstance(call, TrainingCall):
        check_shared_state(call.data, "data", callbacks)
        check_shared_state(call.options["validation_data"], "validation_data", callbacks)
    datasets = read(columns, job)
    if isinstance(job, TrainingJob):
        job = cast("Kind", _resolve_training(job, datasets["train"]))
    if not isinstance(call, PredictionCall):
        check_columns_exist(call, datasets)
    with _encoding:
        request = _encode(job, call, columns, datasets, callbacks, as_file)
    return replace(request, observers=Observers(observers))


def _resolve_training(job: TrainingJob, data: Any) -> TrainingJob:
    """Return the job with the steps that a data set of batches has, and class weights by code."""
    if isinstance(data, Batches):
        job = data.adapt(job)
    job = code_classes(job, data.summary["levels"] if isinstance(data, TableRows) else None)
    check_classes_occur(job, data)
    return job


def _encode(
    job: Kind,
    call: ModelCall,
    columns: ColumnSpec,
    datasets: Mapping[str, Any],
    callbacks: Sequence[Any],
    as_file: bool,
) -> Request[Kind]:
    given = call.model
    model = given.model if isinstance(given, TrainResult) else given
    custom_objects = check_model_options(call.options["model_options"]).custom_objects or {}
    rows: Any = None
    source = model
    if job.model_source == "file":
        from pybackend.core.model.view import ModelView

        source = ModelView(model)
        job = replace(job, **read_keras_defaults())  # a result's model may have loaded Keras
        custom_objects = add_custom_objects(source, custom_objects)
        rows = check_rows_fit(model, datasets, job)
    else:
        job = replace(job, feature_names=_list_features(datasets.get("train")))
    files = encode_model(source, custom_objects, job, callbacks, as_file, rows, datasets)
    snapshot = None
    if isinstance(job, TrainingJob) and MODEL_OBJECTS in files:
        from pybackend.core.model.by_value import take_snapshot

        snapshot = take_snapshot(model)
    return Request(job, files, datasets, columns, model, custom_objects, snapshot, Observers())


def _list_features(data: Any) -> tuple[tuple[str, tuple[str, ...] | None], ...]:
    """Return the names of a table's features, unless they are too many to be read."""
    names = data.feature_names if isinstance(data, TableRows) else {}
    if sum(len(one or ()) for one in names.values()) > _MOST_NAMES:
        return ()
    return tuple((name, one if one is None else tuple(one)) for name, one in names.items())


def _encode_files(datasets: Mapping[str, Any]) -> dict[str, bytes]:
    """Pickle the data sets that workers read from files."""
    return {
        f"{name}{SOURCE}": pickle_value(data, f"`{argument_of(name)}`")
        for name, data in datasets.items()
        if isinstance(data, FileRows)
    }
