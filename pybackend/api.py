"""The calls that users make: train a model, or run a function, on several workers."""

from __future__ import annotations

import base64
import inspect
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pybackend.code import pickled
from pybackend.errors import ClusterError, InputError
from pybackend.job import FUNCTION, run_job, train_job
from pybackend.launchers.outcome import Outcome
from pybackend.request import (
    check_columns,
    check_shapes,
    dataset,
    keras_defaults,
    launched,
    model_files,
    session_of,
    source_of,
    with_own_classes,
)
from pybackend.result import TrainResult
from pybackend.serialization import model_from_base64, sha256_of
from pybackend.values import decode_value


def barrier_train(
    spark: Any,
    model: Any,
    data: Any,
    *,
    workers: int = 2,
    epochs: int = 1,
    batch_size: int = 32,
    steps_per_epoch: int | None = None,
    validation_data: Any = None,
    callbacks: Sequence[Any] | None = None,
    class_weight: Mapping[int, float] | None = None,
    seed: int | None = None,
    shuffle: bool | str = True,
    features: Sequence[str] | None = None,
    label: str = "label",
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
    transport: str = "tcp",
    compression: str | None = None,
    bucket_mb: float = 25.0,
    local_steps: int = 1,
    outer_learning_rate: float = 1.0,
    outer_momentum: float = 0.0,
    verify_weights: bool = False,
    verbose: int = 1,
    timeout: float = 300.0,
) -> TrainResult:
    """Train a Keras model on several workers, exactly as one process would on the same batches.

    Parameters
    ----------
    spark
        None or ``"local"`` for processes of this machine, or a ``pyspark.sql.SparkSession``.
    model
        A compiled Keras 3 model, which is left as it is; or a function without arguments that
        returns one, which then is called on every worker.
    data
        ``(x, y)`` or ``(x, y, sample_weight)`` of arrays with one entry per row, where ``x`` and
        ``y`` may be lists or dicts of arrays; or a Spark DataFrame.
    workers
        Number of worker processes.
    epochs
        Passes over the data: each row is used exactly once in each.
    batch_size
        Rows per worker and step; the global batch is ``workers * batch_size``.
    steps_per_epoch
        Stop each epoch after so many steps. None: use all rows.
    validation_data
        As ``data``; evaluated by all workers together after each epoch.
    callbacks
        Keras callbacks. All run on every worker, except those that write files
        (``ModelCheckpoint``, ``BackupAndRestore``, ``CSVLogger``, ``TensorBoard``,
        ``RemoteMonitor``), which run on rank 0. Copies run on the workers: what they keep in
        attributes stays there. Where one asks to stop, all workers stop after the same step.
    class_weight
        Class to weight of its rows in the loss, for models with one output. Not together with
        sample weights.
    seed
        Makes the training repeatable. None: drawn, and told in the result.
    shuffle
        True or ``"shard"``: each worker visits its rows in a new order each epoch.
        ``"global"`` (arrays only): the workers share out a new order of all rows each epoch, for
        which every worker keeps all rows. False: rows are visited as they come.
    features, label
        Columns of a DataFrame: inputs (None: all but the label) and the label.
    custom_objects
        Name to class or function, for layers, losses and metrics of your own. Classes that a given
        model is made of, and functions that it has as losses, are found without.
    safe_mode
        False lets a model that carries Python code (a ``Lambda`` layer) be loaded.
    transport
        What gradients travel by: ``"tcp"``, or ``"tf"`` for TensorFlow's collectives (NCCL between
        GPUs).
    compression
        ``"fp16"`` or ``"bf16"``: halve what travels. Rounding errors are kept and sent later
        (error feedback), but the result is no longer that of one process. None: exact.
    bucket_mb
        Megabytes of gradients that travel together, while the backward pass goes on.
        ``float("inf")``: all at once, after it.
    local_steps
        Steps that each worker takes by itself before the weights are averaged: 1 is exact, more
        suit slow networks and change the result (local SGD).
    outer_learning_rate, outer_momentum
        With local steps: how the average change is applied. 0.7 and 0.9 give DiLoCo.
    verify_weights
        Compare the workers' weights after every epoch, not only at the start and the end.
        With one worker there is nothing to exchange: all arguments from ``transport`` on to this
        one do nothing then.
    verbose
        0 silent, 1 a line per epoch, 2 also what the workers print.
    timeout
        Seconds of silence after which a worker counts as lost.

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
    began = time.monotonic()
    job = train_job(
        {
            "workers": workers,
            "epochs": epochs,
            "batch_size": batch_size,
            "steps_per_epoch": steps_per_epoch,
            "seed": secrets.randbelow(2**31) if seed is None else seed,
            "shuffle": shuffle,
            "class_weight": class_weight,
            "transport": transport,
            "compression": compression,
            "bucket_mb": bucket_mb,
            "local_steps": local_steps,
            "outer_learning_rate": outer_learning_rate,
            "outer_momentum": outer_momentum,
            "verify_weights": verify_weights,
            "safe_mode": safe_mode,
            "verbose": verbose,
            "timeout": timeout,
        }
    )
    job = replace(job, model_source=source_of(model), **keras_defaults())
    session = session_of(spark)
    check_columns(features, label)
    datasets = {"train": dataset(session, data, "data", features, label, job)}
    if validation_data is not None:
        # By the names that the training data gave, whatever the order of columns there.
        chosen = getattr(datasets["train"], "features", features)
        datasets["validation"] = dataset(
            session, validation_data, "validation_data", chosen, label, job
        )
    files = model_files(model, custom_objects, job, callbacks)
    if job.model_source == "file":
        check_shapes(model, datasets)
        custom_objects = with_own_classes(model, custom_objects)
    outcome = launched(session, job, files, datasets)
    kind, content, digest = _intact_model(outcome)
    history = outcome.reports[0].value
    return TrainResult(
        model_base64=base64.b64encode(content).decode("ascii"),
        model_format=kind,
        model_sha256=digest,
        history=history,
        workers=[replace(report, value=None) for report in outcome.reports],
        seconds=time.monotonic() - began,
        seed=job.seed,
        epochs=max(map(len, history.values()), default=0),
        decode=lambda text: model_from_base64(
            text, custom_objects=custom_objects, safe_mode=safe_mode, sha256=digest
        ),
    )


def barrier_run(
    spark: Any,
    fn: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    verbose: int = 2,
) -> list[Any]:
    """Run a function once per worker, all at the same time, and return what each returned.

    Parameters
    ----------
    spark
        As in `barrier_train`.
    fn
        Called as ``fn(context, *args)`` with a `WorkerContext`. The environment variable
        TF_CONFIG is set, and its ports are reserved, so that
        ``tf.distribute.MultiWorkerMirroredStrategy()`` just works.
    args
        Further arguments; like ``fn`` they travel pickled, from this process to the workers.
    workers
        Number of worker processes. The call lasts as long as the function does.
    verbose
        2 shows what the workers print, 0 and 1 do not.

    Returns
    -------
    list
        One value per rank: plain data (None, numbers, text, bytes, lists, tuples, dicts, numpy
        arrays). Return a model as ``model_to_base64(model)``.

    Raises
    ------
    InputError, ClusterError, WorkerFailedError
        As in `barrier_train`.
    """
    job = run_job(workers, verbose)
    if not callable(fn):
        raise InputError(f"`fn` must be a function, not {type(fn).__name__}")
    _check_takes_context(fn, args)
    session = session_of(spark)
    files = {FUNCTION: pickled((fn, args), "`fn` and its arguments", [fn, *args])}
    outcome = launched(session, job, files, {})
    return [decode_value(report.value) for report in outcome.reports]


def _check_takes_context(fn: Callable[..., Any], args: Sequence[Any]) -> None:
    try:
        signature = inspect.signature(fn)
    except (ValueError, TypeError):  # some of Python's own do not tell
        return
    try:
        signature.bind(None, *args)
    except TypeError as error:
        raise InputError(
            f"`fn` is called as fn(context, *args) with {len(args)} further arguments, but takes "
            f"{signature}: {error}"
        ) from error


def _intact_model(outcome: Outcome) -> tuple[str, bytes, str]:
    """The model's format, content and SHA-256, once the workers are known to agree on it.

    Raises
    ------
    ClusterError
        Where the ranks' weights differ, or the file was altered on its way.
    """
    assert outcome.model is not None
    if len({report.weights_sha256 for report in outcome.reports}) > 1:
        raise ClusterError(
            "the workers' weights differ after the training: a callback, a layer or a train_step "
            "of your own has changed them on one worker and not on the others"
        )
    kind, content = outcome.model
    digest = sha256_of(content)
    if digest != outcome.reports[0].model_sha256:
        raise ClusterError("the model was altered on its way from worker 0: train again")
    return kind, content, digest
