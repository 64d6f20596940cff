"""Train a model on several workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, cast

from pybackend.api.calls import Features, Place, Scaling, TrainingCall, explain_arguments
from pybackend.api.checkpoints import has_checkpoint
from pybackend.api.datasets import note_index
from pybackend.api.detached_job import DetachedJob
from pybackend.api.job_folder import Root
from pybackend.api.prepared_training import PreparedTraining, prepare_training
from pybackend.api.progress import printer
from pybackend.api.restarts import run_with_restarts
from pybackend.api.result import TrainResult
from pybackend.api.returned_model import Decoder, read_model_file
from pybackend.api.scaled import note_scale
from pybackend.api.sent_files import EventFiles, note_files
from pybackend.api.submit import find_detached, submit
from pybackend.api.tracking import recording
from pybackend.data.columns import TableRows
from pybackend.errors import ClusterError
from pybackend.job.checkpoint import Checkpoint, pointing_to
from pybackend.job.job import TRAINED, WEIGHTS, Shuffle, TrainingJob
from pybackend.job.messages import Emit, EpochEnded, Event
from pybackend.job.options import (
    DataOptions,
    Elastic,
    Exchange,
    LocalSteps,
    ParameterServer,
    ScaleLearningRate,
)
from pybackend.job.report import WorkerReport, read_metrics
from pybackend.job.resources import Resources
from pybackend.job.roles import ranks_of
from pybackend.launchers import Outcome
from pybackend.model.serialization import sha256_of


@explain_arguments
def barrier_train(
    spark: Any,
    model: Any,
    data: Any,
    *,
    workers: int | Elastic | None = None,
    epochs: int = 1,
    initial_epoch: int = 0,
    batch_size: int = 32,
    steps_per_epoch: int | None = None,
    validation_data: Any = None,
    validation_split: float = 0.0,
    validation_freq: int | Collection[int] = 1,
    callbacks: Sequence[Any] | None = None,
    class_weight: Mapping[Any, float] | None = None,
    seed: int | None = None,
    shuffle: Shuffle = True,
    features: Features | None = None,
    label: str | Mapping[str, str] | None = "label",
    weight: str | None = None,
    data_options: DataOptions | None = None,
    exchange: Exchange | LocalSteps | ParameterServer | None = None,
    scale_lr: ScaleLearningRate | Scaling | None = None,
    resources: Resources | None = None,
    model_uri: Place | None = None,
    checkpoint: Checkpoint | Place | None = None,
    restarts: int = 0,
    tensorboard: bool | Place | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
    verbose: int = 1,
    timeout: float = 300.0,
    detach: bool | Place = False,
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
    workers
        Number of workers. None (default): 2, or the number of processes that join. `Elastic`:
        training continues without lost workers, and others may join. With a number, losing a worker
        ends training.
    epochs
        Passes over the data. Each pass uses each row exactly once.
    initial_epoch
        Number of epochs that were trained before. Training starts with epoch ``initial_epoch + 1``
        and ends with epoch ``epochs``, as in Keras's ``fit``.
    batch_size
        Maximum rows per worker and step. Global batches are those of Keras's ``fit`` with
        ``batch_size=workers * batch_size``: all have as many rows except the last, which has the
        rest. `replay_batches` lists them. If workers' shares differ in size, as the partitions of a
        Spark DataFrame do, rows are spread evenly over as many steps as the largest share needs.
    steps_per_epoch
        Steps per epoch. The next epoch continues with the rows that follow, and after the last ones
        with the first, also within an epoch: Keras would end that epoch early. None (default): as
        many as it takes to use all rows.
    validation_data
        As ``data``. All workers evaluate it together after each epoch.
    validation_split
        Fraction of the rows to use for validation instead of ``validation_data``. They are the last
        rows of the arrays or the data frame (not a Spark one), before shuffling.
    validation_freq
        Number of epochs between validations, or a list of the epochs to validate after, counted
        from 1.
    callbacks
        Keras callbacks. Each worker runs its own copies, whose attributes stay on the worker.
        ``ModelCheckpoint``, ``CSVLogger``, ``TensorBoard``, ``RemoteMonitor`` and callbacks whose
        attribute ``rank_0_only`` is true run only on rank 0. Files with relative paths are written
        to rank 0's folder. If one callback stops the training, all workers stop after the same
        step. ``BackupAndRestore`` is replaced by a `Checkpoint` that resumes, with the same folder.
        An `Observer` runs in this session; `track_mlflow` and `track_wandb` record the run from it.
    class_weight
        Maps each class to the loss weight of its rows, for models with one output. Keys are class
        codes, or the values of a text label. Cannot be combined with sample weights.
    seed
        Makes training repeatable. None (default): a random seed, which the result reports.
    shuffle
        True (default) or ``"shard"``: each worker shuffles its own rows in each epoch. ``"global"``
        (arrays and files): all rows are shuffled and redistributed in each epoch, so every worker
        stores all rows. False: rows keep their order.
    features
        Columns of a data frame or of files. A list: the columns form one input, of whole numbers if
        all columns hold them, with text as one-hot columns. A mapping from input names to columns:
        several inputs (one without a name has that of its layer); a text column becomes strings,
        unless `DataOptions` sets ``encode``. None (default): all other columns, or the ones used in
        training if ``model`` is a `TrainResult`.
    label
        The label column, or a mapping from output names to columns. Text becomes 0, 1, 2, ... in
        sorted order (`TrainResult.levels`), unless ``categories`` in `DataOptions` lists its
        values. None: the rows have no labels. ``label`` and ``weight`` are not taken from a
        `TrainResult`.
    weight
        Column with the weight of each row in the loss.
    data_options
        `DataOptions`: dtypes and shapes of columns, categories, and where workers store their rows.
    exchange
        `Exchange` (default): gradients are averaged in every step. `LocalSteps`: for slow networks;
        the result no longer equals that of one process. `ParameterServer`: asynchronous training,
        with a result that differs from that of one process. Then ``workers`` is the number of
        workers that take steps; a chief and the servers are additional processes.
    scale_lr
        ``"linear"`` or ``"sqrt"``: multiplies the learning rate by the number of workers or by its
        square root, because a step uses the rows of all workers. `ScaleLearningRate` adds warm-up
        and decay. The history reports the rate of each epoch's last step as ``learning_rate``. Not
        supported for data sets of global batches. None (default): the optimizer's rate.
    resources
        `Resources`: cores, memory and GPUs of each worker. None (default): workers on the same
        machine divide its cores and GPUs.
    model_uri
        Where rank 0 writes the trained model, instead of sending it through the driver: a path that
        all hosts share, or a URI for fsspec. Needed for models of a gigabyte or more.
    checkpoint
        `Checkpoint`, or only its folder: saves the state of training, so that a call with
        ``Checkpoint(..., resume=True)`` can resume.
    restarts
        Number of times that the workers are restarted after one was lost, killed or stopped, or ran
        out of memory: from the newest checkpoint, or else from the beginning. With ``checkpoint``,
        they are also restarted after a preemption (SIGTERM, an eviction) and after the time limit
        of a job. Errors that the model, the data or a callback raises are not retried.
    tensorboard
        Folder on this machine for TensorBoard's event files: the metrics of each epoch, the metrics
        of rank 0's rows every 50 steps, and the graph. On any cluster, rank 0 writes them with
        Keras's callback and sends them here at the end of each epoch and every 10 seconds. True: a
        new folder in ``logs``. A URI that TensorFlow can write to: rank 0 writes there directly.
        See ``tfdist tensorboard`` and `TrainResult.tensorboard`. For a profile, pass a
        ``keras.callbacks.TensorBoard`` in ``callbacks``.
    custom_objects
        Maps names to classes or functions, for custom layers, losses and metrics. The custom
        classes and loss functions of a model that you pass are found without it.
    safe_mode
        False: a model built by a function may be returned as a complete file, even if it contains
        Python code (a ``Lambda`` layer). True (default): only its weights are returned, and the
        function rebuilds the model here. A model that you pass needs no such permission.
    verbose
        0: silent. 1 (default): progress. 2: also the workers' output. Progress is a bar with the
        loss, rows per second and the remaining time, on a terminal and in a notebook with
        ipywidgets; elsewhere it is a line per epoch. Python's logger ``tfdist`` receives all of it,
        whatever ``verbose`` is.
    timeout
        Seconds that workers wait for each other to start. After the same time, a worker counts as
        lost if it was stopped or its machine does not answer. For a worker that is merely slow, the
        others wait up to six hours, and a note names it once a minute.
    detach
        True: a process of its own drives the training, and the call returns a `DetachedJob` as soon
        as it has handed over the model and the rows. This session may then end. `attach_job`
        returns the job in any other session. Its files are in the folder that ``detach`` or the
        environment variable ``TFDIST_JOBS`` names (default: ``~/.local/state/tfdist/jobs``). If
        that is a URI, sessions on other machines find a copy there. On Spark, this needs Spark
        Connect 4.1, and its URL in the variable ``SPARK_REMOTE``.

    Returns
    -------
    TrainResult
        The trained model, its history, and a report of each worker. With ``detach``, a
        `DetachedJob`, whose ``result()`` returns it.

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
    the forward pass, or very large metrics; a note gives the reason. ``checkpoint`` is for the case
    that fewer than ``min`` workers are left or that this process dies: training then resumes at any
    step, with any number of workers, and `TrainResult.generations` lists the worker groups from the
    beginning. Every worker stores all rows, and up to three copies of the model's state in memory.
    With ``max``, workers are started at the beginning and whenever a worker is lost. They join
    between epochs or when a worker is lost, as soon as they are ready. They use any free slot of
    the hosts or of the Spark session, or any free task of the nodes; a slot in which a worker fails
    to start is retried after 30 seconds, and then after pauses that double up to 16 minutes.

    **Resuming.** ``Checkpoint(..., resume=True)`` needs the same call: a different model, data or
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
    call = TrainingCall(
        spark=spark,
        model=model,
        data=data,
        workers=workers,
        epochs=epochs,
        initial_epoch=initial_epoch,
        batch_size=batch_size,
        steps_per_epoch=steps_per_epoch,
        validation_data=validation_data,
        validation_split=validation_split,
        validation_freq=validation_freq,
        callbacks=callbacks,
        class_weight=class_weight,
        seed=seed,
        shuffle=shuffle,
        features=features,
        label=label,
        weight=weight,
        data_options=data_options,
        exchange=exchange,
        scale_lr=scale_lr,
        resources=resources,
        model_uri=model_uri,
        checkpoint=checkpoint,
        restarts=restarts,
        tensorboard=tensorboard,
        custom_objects=custom_objects,
        safe_mode=safe_mode,
        verbose=verbose,
        timeout=timeout,
        detach=detach,
    )
    if (root := find_detached(call)) is None:
        return run_training(call)
    # An overload for this would make type checkers explain wrong arguments badly.
    return cast("TrainResult", submit_training(call, root))


Complete = Callable[[TrainResult], TrainResult]


def submit_training(call: TrainingCall, root: Root) -> DetachedJob:
    """Check a call of `barrier_train`, and hand it over to a process of its own."""
    began = time.monotonic()
    prepared = prepare_training(call)
    note_start(prepared, call)
    return submit(prepared, began, root)


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
    if (note := note_files(call.callbacks, prepared.launcher)) is not None:
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
            outcome = run_with_restarts(request, prepared.launcher, prepared.restarts, parts, say)
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
            "or failed: set `model_uri`"
        )
    kind, content = outcome.model
    digest = sha256_of(content)
    if digest != outcome.reports[0].model_sha256:
        raise ClusterError("the model was altered in transit from worker 0: train again")
    return kind, content, digest
