"""Train a model on several workers."""

from __future__ import annotations

import base64
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pybackend.api.callback_files import note_files
from pybackend.api.calls import Features, Place, Scaling, Strategy, TrainingCall
from pybackend.api.checkpoints import sees_some
from pybackend.api.datasets import note_index
from pybackend.api.decoder import Decoder
from pybackend.api.event_files import EventFiles
from pybackend.api.prepared_training import PreparedTraining, prepare_training
from pybackend.api.progress import printer
from pybackend.api.restarts import run_with_restarts
from pybackend.api.result import TrainResult
from pybackend.api.saving import read_model_file
from pybackend.api.scaled import note_scale
from pybackend.api.settings import describe_settings
from pybackend.api.signatures import explain_arguments
from pybackend.data.columns import TableRows
from pybackend.errors import ClusterError
from pybackend.job.checkpoint import Checkpoint, pointing_to
from pybackend.job.job import TRAINED, WEIGHTS, Shuffle, TrainingJob
from pybackend.job.learning_rate import ScaleLearningRate
from pybackend.job.options import DataOptions, Exchange, LocalSteps
from pybackend.job.report import read_figures
from pybackend.job.resources import Resources
from pybackend.launchers import Outcome
from pybackend.model.serialization import sha256_of


@explain_arguments
def barrier_train(
    spark: Any,
    model: Any,
    data: Any,
    *,
    workers: int | None = None,
    min_workers: int | None = None,
    max_workers: int | None = None,
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
    exchange: Exchange | LocalSteps | None = None,
    scale_lr: ScaleLearningRate | Scaling | None = None,
    resources: Resources | None = None,
    model_uri: Place | None = None,
    checkpoint: Checkpoint | Place | None = None,
    resume: bool = False,
    restarts: int = 0,
    strategy: Strategy | None = None,
    roles: Mapping[str, int] | None = None,
    tensorboard: bool | Place | None = None,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
    verbose: int = 1,
    timeout: float = 300.0,
) -> TrainResult:
    """Train a Keras model on several workers, exactly as one process would on the same batches.

    Parameters
    ----------
    spark
        ``"local"`` for processes on this machine, without Spark, a ``pyspark.sql.SparkSession``,
        what `hosts`, `slurm` or `kubernetes` return, or None: this machine, or, if this process was
        started as one of several (`join`), all of them together.
    model
        A compiled Keras 3 model, which is not changed; a function without arguments that returns
        one and is called on every worker; or a `TrainResult`, whose model is trained further, as a
        second ``fit`` does. Unless others are named, the features are those of that training;
        ``label`` and ``weight`` are not remembered.
    data
        One of

        - ``x``, ``(x, y)`` or ``(x, y, sample_weight)`` of arrays with one entry per row; ``x`` and
          ``y`` may be lists or dicts of arrays. Without labels it is an array, a dict, or ``(x,)``,
          and the model trains as by ``fit(x)``: its ``train_step`` gets the same. Sparse matrices
          of scipy become dense;
        - a Spark DataFrame, or a data frame of pandas, polars or any library that exports Arrow
          streams, with columns of numbers, arrays, ML vectors, bytes or text;
        - ``(x, y)`` or ``(x, y, sample_weight)`` of such a data frame (not of Spark) and of arrays
          or series, which are taken as its columns by position. Labels of text become codes;
        - the path or URI (by fsspec) of Parquet or TFRecord files, a file, a folder or a pattern
          (``"day=*/rows.parquet"``), or a list of them, which the workers read themselves;
        - a ``tf.data.Dataset`` or ``keras.utils.PyDataset`` of global batches ``x``, ``(x, y)`` or
          ``(x, y, sample_weight)``. This process reads all of it, and the workers share out the
          rows of each batch, whatever ``batch_size`` and ``shuffle`` say. A model with its own
          ``train_step`` may take two or three tensors of a batch as its inputs, such as
          ``(anchor, positive, negative)``;
        - a function, called on each worker as ``data(context)`` with a `WorkerContext`, that
          returns a ``tf.data.Dataset`` of local batches. They are used as they come, whatever
          ``batch_size``, ``shuffle`` and ``in_memory`` say; workers whose data end earlier add
          nothing to the remaining steps. Endless data need ``steps_per_epoch``, with which data
          continue from epoch to epoch, and start again at their end.
    workers
        Number of worker processes; None: 2, or as many as there are processes that join.
    min_workers
        Makes the training elastic, on this machine, on `hosts`, on `slurm` without ``nodes``,
        where each worker is a job, or on `kubernetes`: ``workers`` is the number to begin with, and
        training continues without a worker that fails or is preempted (SIGTERM), as long as this
        many are left. The processes of the others keep running; only their connections are opened
        again. The epoch in which a worker fails is repeated from its beginning, and one that is
        preempted leaves after its epoch, so each epoch uses each row exactly once, and the result
        is that of one process on the batches of so many workers as each epoch had
        (`TrainResult.workers_by_epoch`). Every worker keeps all rows, and, in memory, the state of
        the epoch's beginning. None: a worker that is lost ends the training.
    max_workers
        Others are started until there are so many, at the beginning and whenever a worker has gone;
        they join between two epochs, when they are ready. Of `hosts` all slots are used, and one
        where none can be started is tried again every 30 seconds. None: none are.
    epochs
        Passes over the data: each row is used exactly once in each.
    initial_epoch
        Epochs that were trained before: training starts with epoch ``initial_epoch + 1`` and ends
        with epoch ``epochs``, as in Keras's ``fit``.
    batch_size
        Most rows per worker and step. Rows are spread evenly over the steps: a global batch has at
        most ``workers * batch_size`` rows, which `replay_batches` lists.
    steps_per_epoch
        Steps of an epoch; the next one goes on with the rows that follow. None: use all rows.
    validation_data
        As ``data``; evaluated by all workers together after each epoch.
    validation_split
        The fraction of the rows, from the end of arrays or of a data frame (not of Spark), before
        they are shuffled, that validates in place of ``validation_data``.
    validation_freq
        Evaluate after every so many epochs, or after the epochs in a list, counted from 1.
    callbacks
        Keras callbacks. All run on every worker, except those that write files
        (``ModelCheckpoint``, ``CSVLogger``, ``TensorBoard``, ``RemoteMonitor``) and those with an
        attribute ``rank_0_only`` that is true, which run on rank 0: files with relative paths lie
        in its folder. Copies run on the workers: what they keep in attributes stays there. When
        one asks to stop, all workers stop after the same step. ``BackupAndRestore`` stands for
        ``checkpoint`` with its folder, and ``resume``. An `Observer` among them is called in this
        session.
    class_weight
        Class to weight of its rows in the loss, for models with one output: by its code, or, if the
        label is text, by its level. Not together with sample weights.
    seed
        Makes the training repeatable. None: drawn at random, and reported in the result.
    shuffle
        True or ``"shard"``: each worker uses its rows in a new order each epoch. ``"global"``
        (arrays and files): the workers share out a new order of all rows each epoch, so every
        worker keeps all rows. False: rows are used in the order in which they come.
    features
        Columns of a data frame or of files. A list: side by side, one input, of whole numbers if
        all columns are; text among them is one-hot. A mapping from the model's input names to
        columns: several inputs, of which a text column gives strings, unless ``encode`` of the
        options says otherwise. None: all columns that are not used otherwise.
    label
        The label's column, or a mapping from output names to columns. Text becomes 0, 1, 2, ... in
        sorted order (`TrainResult.levels`), unless ``categories`` of the options lists its values.
        None: the rows have no labels.
    weight
        Column with the weight of each row in the loss.
    data_options
        `DataOptions`: the types and shapes of columns, categories, and where workers keep their
        rows.
    exchange
        `Exchange`, by which the result is that of one process, or `LocalSteps` for slow networks.
    scale_lr
        ``"linear"`` or ``"sqrt"``: the learning rate is multiplied by the number of workers or by
        its square root, since a step has the rows of all of them. `ScaleLearningRate` adds warm-up
        and decay. The history has the rate of each epoch's last step, as ``learning_rate``. Not for
        data sets of global batches. None: the rate is that of the optimizer.
    resources
        `Resources`: the cores, memory and GPUs of each worker. None: workers that share a machine
        divide its cores and GPUs.
    model_uri
        Where rank 0 writes the trained model (a path that all hosts share, or a URI for fsspec)
        instead of sending it through the driver. Needed for models of a gigabyte.
    checkpoint
        `Checkpoint`, or just its folder: keeps the training's state, from which it can go on.
    resume
        Go on from the newest intact checkpoint; without any, begin at the beginning. The same call
        must be made: another model, other data or settings are refused, but ``epochs`` may be
        raised. The result is that of a training without an interruption, its history included.
        Between two epochs ``workers`` may change: then the weights, the optimizer and the history
        are those of the checkpoint, and the training goes on as one process does on the batches
        of so many workers, with other dropout masks.
    restarts
        How often the workers are started again if one is lost, killed, stopped or out of memory:
        from the newest checkpoint, or else from the beginning. With `checkpoint` also if workers
        were told to end (SIGTERM: preempted, evicted), or a job has reached its time limit. What
        the model, the data or a callback raises is not tried again.
    strategy
        ``"parameter_server"`` trains asynchronously, by TensorFlow's ``ParameterServerStrategy``
        and ``ClusterCoordinator``: the weights lie on parameter servers, and each worker takes
        steps on batches of its own rows without waiting for others. The result is *not* that of
        one process, and differs from run to run. An epoch has as many steps as all rows make
        batches; workers take them as they are ready, so that a faster one takes more, and their
        rows more often. A worker that is lost is done without (not on Spark, nor in processes that
        join). None: synchronous, and exact. The names of TensorFlow's other strategies are refused,
        and say what to use.
    roles
        With ``strategy``, how many processes have which role, ``{"chief": 1, "worker": 2,
        "ps": 1}``: one chief, which schedules the steps and has the model at the end. Without it,
        there is one parameter server, and ``workers`` is the number of those that take steps.
    tensorboard
        Where to write what TensorBoard shows: the figures of each epoch, those of rank 0's rows
        every 50 steps, and the graph. A folder of this machine, on any cluster: rank 0 writes with
        Keras's callback, and sends what it has written here, at each epoch's end and every 10
        seconds. True: a new folder in ``logs``. A URI that TensorFlow can write to: rank 0 writes
        there itself. See ``tfdist tensorboard`` and `TrainResult.tensorboard`; for a profile pass
        a ``keras.callbacks.TensorBoard`` among the ``callbacks``.
    custom_objects
        Name to class or function, for custom layers, losses and metrics. Custom classes that a
        given model consists of, and functions that it has as losses, are found without it.
    safe_mode
        False lets a model that a function builds come back as a whole file although it carries
        Python code (a ``Lambda`` layer). Otherwise its weights come back, and the function builds
        the model here. A model that is passed itself needs no such leave.
    verbose
        0 silent, 1 progress, 2 also whatever the workers print. Progress is a bar with loss, rows
        per second and the time that is left, on a terminal and in a notebook that has ipywidgets,
        and elsewhere a line per epoch. Python's logger ``tfdist`` has all of it, whatever
        ``verbose`` says.
    timeout
        Seconds that workers wait for each other to start, and after which a worker counts as lost
        that was stopped or whose machine does not answer. A slow one is waited for (six hours at
        most), and named once a minute.

    Returns
    -------
    TrainResult

    Raises
    ------
    InputError
        An argument is wrong; nothing was started.
    ClusterError
        Spark cannot run the job.
    WorkerFailedError
        A worker failed: rank, host, traceback and last log lines are in the message.
    SerializationError
        The model cannot be encoded.
    """
    call = TrainingCall(
        spark=spark,
        model=model,
        data=data,
        workers=workers,
        min_workers=min_workers,
        max_workers=max_workers,
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
        resume=resume,
        restarts=restarts,
        strategy=strategy,
        roles=roles,
        tensorboard=tensorboard,
        custom_objects=custom_objects,
        safe_mode=safe_mode,
        verbose=verbose,
        timeout=timeout,
    )
    return run_training(call)


def run_training(call: TrainingCall) -> TrainResult:
    """Check a call, run it, and make the result: what `barrier_train` does."""
    began = time.monotonic()
    prepared = prepare_training(call)
    request, kept = prepared.request, prepared.request.job.checkpoint
    say = printer(request.job.verbose)
    if (note := note_files(call.callbacks, prepared.launcher)) is not None:
        say(note)
    for note in note_index(request.datasets):
        say(note)
    files = EventFiles(request.job.tensorboard, say)
    with files, pointing_to(kept, partial(sees_some, kept)):
        outcome = run_with_restarts(request, prepared.launcher, prepared.restarts, files)
        result = _make_result(prepared, outcome, began)
    note_scale(request, result)
    files.conclude()
    return result


def _make_result(prepared: PreparedTraining, outcome: Outcome, began: float) -> TrainResult:
    request = prepared.request
    job = outcome.job if isinstance(outcome.job, TrainingJob) else request.job
    trained_on = request.datasets["train"]
    kind, content, digest = _check_model(outcome, job.model_uri)
    history = read_figures(outcome.reports[0], list)
    inputs, weights = outcome.reports[0].inputs, str(outcome.reports[0].weights_sha256)
    # Not the request itself: its data are not to live as long as the result.
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
    return TrainResult(
        model_base64=base64.b64encode(content).decode("ascii"),
        model_format=kind,
        model_uri=job.model_uri,
        **(trained_on.summary if isinstance(trained_on, TableRows) else {}),
        model_sha256=digest,
        history=history,
        workers=[replace(report, value=None, inputs=None) for report in outcome.reports],
        seconds=time.monotonic() - began,
        seed=job.seed,
        epochs=max(map(len, history.values()), default=0),
        inputs=inputs,
        gangs=list(outcome.gangs),
        restarts=list(outcome.restarts),
        tensorboard=job.tensorboard,
        settings=describe_settings(job, prepared.launcher, prepared.restarts),
        initial_epoch=job.initial_epoch,
        validation_freq=job.validation_freq,
        fetch=read_model_file,
        decode=decode,
    )


def _check_model(outcome: Outcome, uri: str | None) -> tuple[str, bytes, str]:
    """The model's format, content and SHA-256, if the workers agree on it.

    The content is empty if the model was written to a URI.

    Raises
    ------
    ClusterError
        The ranks' weights differ, or the file was altered on its way.
    """
    if len({report.weights_sha256 for report in outcome.reports} - {None}) > 1:
        raise ClusterError(
            "the workers' weights differ after the training: a custom callback, layer or "
            "train_step has changed them on one worker and not on the others"
        )
    if uri is not None:
        kind = max((kind for kind in TRAINED if uri.endswith(f".{kind}")), key=len)
        return kind, b"", str(outcome.reports[0].model_sha256)
    assert outcome.model is not None
    kind, content = outcome.model
    digest = sha256_of(content)
    if digest != outcome.reports[0].model_sha256:
        raise ClusterError("the model was altered on its way from worker 0: train again")
    return kind, content, digest
