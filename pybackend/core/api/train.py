"""Train a model on several workers."""

from __future__ import annotations

from typing import Any, Unpack

from pybackend.core.api.calls import Target, TrainingCall, explain_arguments, take_options
from pybackend.core.api.detached_job import DetachedJob
from pybackend.core.api.prepared_training import prepare_training
from pybackend.core.api.submit import check_submission, submit
from pybackend.core.api.train_result import TrainResult
from pybackend.core.api.training_run import run_training, show_notes
from pybackend.core.job.call_options import PathOrUri, TrainingOptions


@explain_arguments
@take_options
def barrier_train(
    spark: Target, model: Any, data: Any, **options: Unpack[TrainingOptions]
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
    folder: PathOrUri | None = None,
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
    root = check_submission(call, folder)
    prepared = prepare_training(call, starts_workers=False)
    show_notes(prepared)
    return DetachedJob(submit(prepared, root))
