"""Train a model on several workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, Unpack

from pybackend.core.api.calls import Target, TrainingCall, explain_arguments, take_options
from pybackend.core.api.checkpoints import has_checkpoint
from pybackend.core.api.datasets import note_index
from pybackend.core.api.detached_job import DetachedJob
from pybackend.core.api.prepared_training import PreparedTraining, prepare_training
from pybackend.core.api.progress import printer
from pybackend.core.api.restarts import run_with_restarts
from pybackend.core.api.result import TrainResult
from pybackend.core.api.returned_model import Decoder, read_model_file
from pybackend.core.api.scaled import note_scale
from pybackend.core.api.sent_files import EventFiles, note_files
from pybackend.core.api.submit import check_submission, submit
from pybackend.core.api.tracking import recording
from pybackend.core.data.columns import TableRows
from pybackend.core.errors import ClusterError
from pybackend.core.job.call_options import Place, TrainingOptions
from pybackend.core.job.job import TRAINED, WEIGHTS, TrainingJob
from pybackend.core.job.messages import Emit, EpochEnded, Event
from pybackend.core.job.report import WorkerReport, read_metrics
from pybackend.core.job.storage_options import pointing_to
from pybackend.core.launchers import Outcome
from pybackend.core.model.serialization import sha256_of
from pybackend.core.tf_config import ranks_of


@explain_arguments
@take_options
def barrier_train(
    spark: Target,
    model: Any,
    data: Any,
    **options: Unpack[TrainingOptions],
) -> TrainResult:
    """Train a Keras model on several workers.

    The result equals that of one process on the same global batches, up to rounding, unless an
    option changes that. Most calls need only some of the arguments up to ``weight``. The arguments
    after it are for special needs. The notes describe ``data``, elastic training and resuming in
    full.

    Parameters
    ----------
    spark
        Where the workers run: ``"local"`` (processes on this machine), a
        ``pyspark.sql.SparkSession``, or the result of `hosts`, `slurm` or `kubernetes`. None: all
        processes that were started together (`join`), or this machine if there is only one process.
    model
        A compiled Keras 3 model, which stays unchanged; a function without arguments that returns
        one, called on every worker; or a `TrainResult`, whose model is trained further, as in a
        second call of ``fit``.
    data
        ``x``, ``(x, y)`` or ``(x, y, sample_weight)`` of arrays; a data frame; paths of Parquet or
        TFRecord files; a data set of global batches; or a function that returns a data set for its
        worker.

    Returns
    -------
    TrainResult
        The trained model, its history, and a report of each worker.

    Raises
    ------
    InputError
        An argument is invalid. Nothing was started.
    ClusterError
        The cluster cannot run the job.
    WorkerFailedError
        A worker failed. The message has its rank, host, traceback and last log lines.
    SerializationError
        The model cannot be encoded.

    Notes
    -----
    ``data`` is one of

    - ``x``, ``(x, y)`` or ``(x, y, sample_weight)`` of arrays with one entry per row. ``x`` and
      ``y`` may be lists or dicts of arrays. Data without labels is an array, a dict, or ``(x,)``:
      the model trains as with ``fit(x)``, and its ``train_step`` gets the same input. Sparse scipy
      matrices become dense;
    - a Spark DataFrame, or a data frame of pandas, polars or any library that exports Arrow
      streams. Columns hold numbers, arrays, ML vectors, bytes, text or lists of text;
      ``features=["s.a"]`` uses a field of a Spark struct;
    - ``(x, y)`` or ``(x, y, sample_weight)`` of such a data frame (not a Spark one) and arrays or
      series, which are added to it as columns by position. Text labels become codes;
    - the path or URI (for fsspec) of Parquet or TFRecord files: a file, a folder, a pattern
      (``"day=*/rows.parquet"``), or a list of them. The workers read the files themselves;
    - a ``tf.data.Dataset`` or ``keras.utils.PyDataset`` of global batches ``x``, ``(x, y)`` or
      ``(x, y, sample_weight)``. This process reads all of it, and the workers share the rows of
      each batch; ``batch_size`` and ``shuffle`` are ignored. With ``steps_per_epoch``, a
      ``tf.data.Dataset`` may be infinite: only the steps of all epochs are read. A `PyDataset`'s
      ``on_epoch_begin`` and ``on_epoch_end`` are called as in Keras. A model with its own
      ``train_step`` may use two or three tensors of a batch as its inputs, such as ``(anchor,
      positive, negative)``;
    - a function ``data(context)``, called on each worker with a `WorkerContext`, that returns a
      ``tf.data.Dataset`` of local batches. They are used unchanged; ``batch_size``, ``shuffle`` and
      ``in_memory`` are ignored. A worker whose data ends earlier adds nothing to the remaining
      steps. Infinite data needs ``steps_per_epoch``. With it, the data continues from epoch to
      epoch, and starts over when it ends.

    **Elastic training.** ``workers=Elastic(...)`` works on this machine, on `hosts`, on Spark, on
    `slurm` and on `kubernetes`. On Spark each worker is a Spark job with one task, so the others
    continue when an executor is lost. On `slurm` each worker is a job, or with ``nodes`` a step of
    one job. When a worker fails, the other processes stay alive and only reconnect. They repeat the
    step that failed, and share the rows that the epoch has not used yet. A preempted worker
    (SIGTERM) leaves at the end of its epoch. So each epoch uses each row exactly once, and the
    result equals that of one process on the batches that `replay_batches` lists for
    `TrainResult.generations`. The epoch is repeated from the beginning if the model has its own
    ``train_step`` or ``compute_metrics``, runs eagerly, takes several steps per execution,
    accumulates gradients, or has masks that reach the loss, layers that assign trainable weights in
    the forward pass, or very large metrics; a note gives the reason. A `Recovery` is for the case
    that fewer than ``min`` workers are left or that this process dies: training then resumes at any
    step, with any number of workers, and `TrainResult.generations` lists the worker groups from the
    beginning. Every worker stores all rows, and up to three copies of the model's state in memory.
    With ``max``, workers are started at the beginning and whenever a worker is lost. They join
    between epochs or when a worker is lost, as soon as they are ready. They use any free slot of
    the hosts or of the Spark session, or any free task of the nodes; a slot in which a worker fails
    to start is retried after 30 seconds, and then after pauses that double up to 16 minutes.

    **Resuming.** ``Recovery(..., resume=True)`` needs the same call: a different model, data or
    settings raise an error, but ``epochs`` may be larger. The result, including its history, is
    that of an uninterrupted run (of elastic training: up to rounding). ``workers`` may change
    between epochs. Then training continues
    from the weights, the optimizer state and the history in the checkpoint, as one process would on
    the batches for the new number of workers, but with different dropout masks.

    **Parameter servers.** ``exchange=ParameterServer()`` uses TensorFlow's
    ``ParameterServerStrategy`` and ``ClusterCoordinator``. The weights are on parameter servers,
    and each worker takes steps on batches of its own rows without waiting for others. The result
    differs from run to run. The number of steps in an epoch is the total number of batches on all
    workers. A faster worker takes more steps, so it uses its rows more often. Training continues
    without a lost worker, except on Spark and in processes that call `join`.
    """
    return run_training(TrainingCall(spark=spark, model=model, data=data, options=options))


@explain_arguments
@take_options
def submit_training(
    spark: Target,
    model: Any,
    data: Any,
    *,
    folder: Place | None = None,
    **options: Unpack[TrainingOptions],
) -> DetachedJob:
    """Hand a training over to a process of its own, so that this session may end.

    The call returns as soon as it has handed over the model and the rows. `attach_job` returns the
    job in any other session. On Spark, this needs Spark Connect 4.1, and its URL in the environment
    variable ``SPARK_REMOTE``.

    Parameters
    ----------
    spark, model, data
        As in `barrier_train`, but not processes that `join`.
    folder
        Folder for the files of all jobs. If it is a URI, sessions on other machines find a copy
        there. None (default): the environment variable ``TFDIST_JOBS``, or
        ``~/.local/state/tfdist/jobs``.

    Returns
    -------
    DetachedJob
        ``result()`` waits for the `TrainResult`.

    Raises
    ------
    InputError, ClusterError, SerializationError
        As in `barrier_train`: all checks run before the call returns.

    Examples
    --------
    >>> job = submit_training("local", model, (x, y), epochs=50)  # doctest: +SKIP
    >>> job.result()  # doctest: +SKIP
    """
    call = TrainingCall(spark=spark, model=model, data=data, options=options)
    root, began = check_submission(call, folder), time.monotonic()
    prepared = prepare_training(call)
    note_start(prepared, call)
    return submit(prepared, began, root)


Complete = Callable[[TrainResult], TrainResult]


def run_training(call: TrainingCall, complete: Complete = lambda result: result) -> TrainResult:
    """Check a call of `barrier_train`, run it, and return the result.

    Parameters
    ----------
    complete
        Completes the result before it is recorded by trackers.
    """
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
    """Run a checked training, and return the result.

    Parameters
    ----------
    began
        When the call began, in seconds of the monotonic clock.
    say
        Shows notes about the whole run.
    listen
        Receives the workers' events.
    complete
        As in `run_training`.
    """
    request, checkpoint = prepared.request, prepared.request.job.checkpoint
    files = EventFiles(request.job.tensorboard, say)
    with recording(prepared, say) as record:
        parts = _Parts(began, files, record, listen)
        with files, pointing_to(checkpoint, partial(has_checkpoint, checkpoint)):
            outcome = run_with_restarts(request, prepared.launcher, prepared.recovery, parts, say)
            result = complete(_make_result(prepared, outcome, parts))
        note_scale(request, result)
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

    Raises
    ------
    ClusterError
        The ranks' weights differ, or the file was altered in transit.
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
