"""The calls that users make: train a model, or run a function, on several workers."""

from __future__ import annotations

import base64
import inspect
import re
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pybackend.code import pickled
from pybackend.data import arrays
from pybackend.data.sharding import steps_per_epoch as steps_in_epoch
from pybackend.errors import ClusterError, InputError
from pybackend.job import (
    EXTRAS,
    FUNCTION,
    MODEL_FILE,
    MODEL_FUNCTION,
    Job,
    run_job,
    train_job,
)
from pybackend.launchers import local
from pybackend.launchers.outcome import Outcome
from pybackend.progress import printer
from pybackend.result import TrainResult
from pybackend.serialization import model_from_base64, model_to_bytes, sha256_of
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
    seed: int | None = None,
    shuffle: bool = True,
    features: Sequence[str] | None = None,
    label: str = "label",
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
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
        (``ModelCheckpoint``, ``CSVLogger``, ``TensorBoard``), which run on rank 0. Copies run
        on the workers: what they keep in attributes stays there.
    seed
        Makes the training repeatable. None: drawn, and told in the result.
    shuffle
        Whether each worker visits its rows in a new order each epoch.
    features, label
        Columns of a DataFrame: inputs (None: all but the label) and the label.
    custom_objects
        Name to class or function, for layers, losses and metrics of your own.
    safe_mode
        False lets a model that carries Python code (a ``Lambda`` layer) be loaded.
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
            "safe_mode": safe_mode,
            "verbose": verbose,
            "timeout": timeout,
        }
    )
    job = replace(job, model_source=_source_of(model), **_keras_defaults())
    session = session_of(spark)
    _check_columns(features, label)
    datasets = {"train": _dataset(session, data, "data", features, label, job)}
    if validation_data is not None:
        # By the names that the training data gave, whatever the order of columns there.
        chosen = getattr(datasets["train"], "features", features)
        datasets["validation"] = _dataset(
            session, validation_data, "validation_data", chosen, label, job
        )
    files = _training_files(model, callbacks, custom_objects, job)
    if job.model_source == "file":
        _check_shapes(model, datasets)
    outcome = _launch(session, job, files, datasets)
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
    session = session_of(spark)
    files = {FUNCTION: pickled((fn, args), "`fn` and its arguments", [fn, *args])}
    outcome = _launch(session, job, files, {})
    return [decode_value(report.value) for report in outcome.reports]


def session_of(spark: Any) -> Any:
    """None for this machine, or the Spark session to use.

    Raises
    ------
    InputError
        Where ``spark`` is neither.
    """
    if spark is None or (isinstance(spark, str) and re.fullmatch(r"local(\[(\d+|\*)\])?", spark)):
        return None
    kind = type(spark)
    if kind.__module__.startswith("pyspark.") and kind.__name__ == "SparkSession":
        return spark
    hint = " (pass SparkSession.builder.getOrCreate())" if kind.__name__ == "SparkContext" else ""
    raise InputError(
        f"`spark` must be None, 'local' or a SparkSession, not {spark!r}{hint}"
        if isinstance(spark, (str, int, float))
        else f"`spark` must be None, 'local' or a SparkSession, not a {kind.__name__}{hint}"
    )


def _launch(
    session: Any, job: Job, files: Mapping[str, bytes], datasets: Mapping[str, Any]
) -> Outcome:
    on_event = printer(job.verbose)
    if session is None:
        return local.launch(job, files, datasets, on_event)
    # pyspark is optional: its launcher is imported where there is a session.
    from pybackend.launchers import spark as spark_launcher

    return spark_launcher.launch(session, job, files, datasets, on_event)


def _dataset(
    session: Any, data: Any, name: str, features: Sequence[str] | None, label: str, job: Job
) -> Any:
    """Check a data set and give it the form that launchers take: columns, or a Spark selection."""
    if type(data).__module__.startswith("pyspark.sql") and type(data).__name__ == "DataFrame":
        if session is None:
            raise InputError(
                f"`{name}` is a Spark DataFrame, but `spark` is None or 'local': pass its "
                "session, e.g. barrier_train(df.sparkSession, model, df, ...)"
            )
        from pybackend.data.dataframe import Selection

        return Selection.of(data, features, label, name)
    columns = arrays.columns_of(data, job.floatx, name)
    rows = arrays.rows_of(columns)
    if name == "data":
        arrays.check_enough_rows(rows, job.workers)
        check_steps(rows, job)
    elif rows == 0:
        raise InputError(f"`{name}` has no rows")
    return columns


def check_steps(rows: int, job: Job) -> None:
    """Refuse more steps per epoch than the rows give."""
    full = steps_in_epoch([-(-rows // job.workers)], job.batch_size)
    if job.steps_per_epoch is not None and job.steps_per_epoch > full:
        raise InputError(
            f"`steps_per_epoch` is {job.steps_per_epoch}, but {rows} rows give {full} steps of "
            f"{job.workers} x {job.batch_size} rows"
        )


def _training_files(
    model: Any,
    callbacks: Sequence[Any] | None,
    custom_objects: Mapping[str, Any] | None,
    job: Job,
) -> dict[str, bytes]:
    files = {}
    if callbacks is not None and not isinstance(callbacks, (list, tuple)):
        callbacks = [callbacks]
    _check_callbacks(callbacks or [])
    if not isinstance(custom_objects, (Mapping, type(None))):
        raise InputError(
            "`custom_objects` must map names to classes or functions, not "
            f"{type(custom_objects).__name__}"
        )
    if callbacks or custom_objects:
        extras: dict[str, Any] = {
            "callbacks": list(callbacks or []),
            "custom_objects": dict(custom_objects or {}),
        }
        files[EXTRAS] = pickled(
            extras,
            "`callbacks` or `custom_objects`",
            [*extras["callbacks"], *extras["custom_objects"].values()],
        )
    if job.model_source == "function":
        return {**files, MODEL_FUNCTION: pickled(model, "the `model` function", [model])}
    from pybackend.engine.checks import check_model

    check_model(model)
    return {**files, MODEL_FILE: model_to_bytes(model, format="keras", include_optimizer=True)}


def _source_of(model: Any) -> Literal["file", "function"]:
    """Whether a model or a function that builds one was given; an error for all else."""
    keras = sys.modules.get("keras")
    if keras is not None and isinstance(model, keras.Model):
        return "file"
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if kind.startswith("tf_keras"):
        raise InputError("this is a Keras 2 model (tf_keras): tfdist trains Keras 3 models")
    if not callable(model):
        raise InputError(
            f"`model` must be a compiled Keras model or a function that returns one, not a {kind}"
        )
    try:
        parameters = list(inspect.signature(model).parameters.values())
    except (ValueError, TypeError):  # some of Python's own do not tell
        parameters = []
    needed = [
        parameter.name
        for parameter in parameters
        if parameter.default is parameter.empty
        and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    if needed:
        raise InputError(
            f"the `model` function needs arguments ({', '.join(needed)}): workers call it "
            "without any, so wrap it, e.g. lambda: build(units=64)"
        )
    return "function"


def _check_callbacks(callbacks: Sequence[Any]) -> None:
    # Keras is loaded already where there is a callback that it could accept.
    if "keras" in sys.modules:
        from pybackend.engine.checks import check_callbacks

        check_callbacks(callbacks)
    elif callbacks:
        name = type(callbacks[0]).__name__
        raise InputError(f"`callbacks` holds {name}, which is no keras.callbacks.Callback")


def _check_columns(features: Any, label: Any) -> None:
    if not isinstance(label, str):
        raise InputError(f"`label` must be the name of a column, not {label!r}")
    named = [features] if isinstance(features, str) else features
    if named is not None and not (
        isinstance(named, (list, tuple)) and all(isinstance(name, str) for name in named)
    ):
        raise InputError(f"`features` must be names of columns, not {features!r}")


def _keras_defaults() -> dict[str, Any]:
    """Keras's global settings, which can differ from its own only where Keras is loaded."""
    keras = sys.modules.get("keras")
    if keras is None:
        return {}
    return {
        "floatx": keras.config.floatx(),
        "dtype_policy": keras.config.dtype_policy().name,
        "image_data_format": keras.config.image_data_format(),
    }


def _check_shapes(model: Any, datasets: Mapping[str, Any]) -> None:
    """Refuse arrays that do not fit the model's input; the model has loaded TensorFlow anyway."""
    from pybackend.engine.feed import shaped_for

    for columns in datasets.values():
        if isinstance(columns, dict):
            shaped_for(columns, model)


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
