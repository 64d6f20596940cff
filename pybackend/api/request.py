"""What every call does with its arguments: check them, and make a job's files and rows of them."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from pybackend.api.progress import printer
from pybackend.data import arrays
from pybackend.data.columns import ColumnSpec, TableRows, check_column_spec
from pybackend.data.sharding import count_steps as steps_in_epoch
from pybackend.data.sources import FileRows, FunctionRows
from pybackend.errors import InputError
from pybackend.job.job import EXTRAS, MODEL_FILE, MODEL_FUNCTION, SOURCE, Job, argument_of
from pybackend.job.options import DataOptions
from pybackend.job.pickling import pickled
from pybackend.launchers import Launcher, Outcome
from pybackend.model.serialization import model_to_bytes

_READ_BY_WORKERS = (FileRows, FunctionRows)


def run(
    launcher: Launcher, job: Job, files: Mapping[str, bytes], datasets: Mapping[str, Any]
) -> Outcome:
    """Run a job to its end where its launcher leads, and show its progress."""
    own = {name: data for name, data in datasets.items() if isinstance(data, _READ_BY_WORKERS)}
    datasets = {name: data for name, data in datasets.items() if name not in own}
    return launcher.launch(job, {**files, **_source_files(own)}, datasets, printer(job.verbose))


def _source_files(datasets: Mapping[str, Any]) -> dict[str, bytes]:
    """What workers read for themselves, as files that tell them how."""
    return {
        f"{name}{SOURCE}": pickled(
            data, f"the function `{argument_of(name)}`", [getattr(data, "fn", None)]
        )
        for name, data in datasets.items()
    }


def column_spec(
    features: Any, label: Any, weight: Any, options: DataOptions, finds_levels: bool = True
) -> ColumnSpec:
    """Check which columns are used, and as what."""
    spec = ColumnSpec(
        features,
        label,
        weight,
        options.tensors,
        options.categories,
        options.tfrecord_spec,
        options.repartition,
        finds_levels,
    )
    check_column_spec(spec)
    return spec


def dataset(launcher: Launcher, data: Any, name: str, choice: ColumnSpec, job: Job) -> Any:
    """Check a data set and give it the form that launchers take.

    Returns
    -------
    Columns of arrays, a `DataFrameRows`, or what workers read for themselves: a `FileRows` or a
    `FunctionRows`.
    """
    if type(data).__module__.startswith("pyspark.sql") and type(data).__name__ == "DataFrame":
        return _selection(launcher, data, name, choice, job)
    if isinstance(data, (str, os.PathLike)):
        return _file_rows(data, name, choice, job)
    if callable(data):
        return _function_rows(data, name, job)
    columns = arrays.flatten_data(data, job.floatx, name)
    _check_one_label(job, "y" in columns or name != "data")
    _check_weights(job, "sample_weight" in columns and name == "data")
    _check_rows(arrays.count_rows(columns), name, job)
    return columns


def _selection(launcher: Launcher, data: Any, name: str, choice: ColumnSpec, job: Job) -> Any:
    if launcher.session is None:
        raise InputError(
            f"`{name}` is a Spark DataFrame, but `spark` is None or 'local': pass its "
            "session, e.g. barrier_train(df.sparkSession, model, df, ...)"
        )
    from pybackend.data.dataframe import DataFrameRows

    if choice.tfrecord_spec is not None and name == "data":
        raise InputError(f"`tfrecord_spec` is given, but `{name}` is a DataFrame")
    if job.shuffle == "global" and name == "data":
        raise InputError(
            "shuffle='global' needs all rows on every worker: pass arrays, or shuffle=True (the "
            "rows of a DataFrame are spread over the workers at random anyway), or files"
        )
    _check_one_label(job, isinstance(choice.label, str))
    _check_weights(job, choice.weight is not None)
    return DataFrameRows.of(data, choice, job.floatx, name)


def _file_rows(path: Any, name: str, choice: ColumnSpec, job: Job) -> Any:
    if not os.fspath(path):
        raise InputError(f"`{name}` is an empty path")
    rows = FileRows.at(path, choice, job.floatx, name)
    _check_one_label(job, isinstance(choice.label, str))
    _check_weights(job, choice.weight is not None)
    _check_rows(rows.rows, name, job)
    return rows


def _function_rows(fn: Any, name: str, job: Job) -> Any:
    check_takes(fn, f"{name}(context)", None)
    if name != "data":
        return FunctionRows(fn)
    if job.shuffle == "global":
        raise InputError(f"shuffle='global' cannot reorder what the function `{name}` returns")
    if job.class_weight is not None:
        raise InputError(
            f"`class_weight` needs labels that are known before; have the function `{name}` return "
            "(x, y, sample_weight)"
        )
    return FunctionRows(fn)


def check_columns_named(choice: ColumnSpec, datasets: Mapping[str, Any]) -> None:
    """Refuse arguments about columns where no data set has any."""
    if any(isinstance(data, TableRows) for data in datasets.values()):
        return
    for argument in ("features", "weight", "tensors", "categories", "tfrecord_spec"):
        if getattr(choice, argument) is not None:
            raise InputError(
                f"`{argument}` is about columns, of which `data` has none: it is for DataFrames "
                "and files"
            )


def check_takes(fn: Any, call: str, *arguments: Any) -> None:
    """Refuse a function that cannot be called with these arguments."""
    try:
        signature = inspect.signature(fn)
    except (ValueError, TypeError):  # some of Python's own do not tell
        return
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise InputError(
            f"the function is called as {call} with {len(arguments) - 1} arguments after the "
            f"context, but takes {signature}: {error}"
        ) from error


def _check_one_label(job: Job, is_one: bool) -> None:
    if job.class_weight is not None and not is_one:
        raise InputError("`class_weight` needs a model with one output: weight rows instead")


def _check_weights(job: Job, has_weights: bool) -> None:
    if job.class_weight is not None and has_weights:
        raise InputError(
            "`class_weight` and sample weights exclude each other: multiply them into one"
        )


def _check_rows(rows: int, name: str, job: Job) -> None:
    if name == "data" and job.kind == "train":
        arrays.check_enough_rows(rows, job.workers)
        check_steps(rows, job)
    elif rows == 0:
        raise InputError(f"`{name}` has no rows")


def for_validation(choice: ColumnSpec, trained_on: Any) -> ColumnSpec:
    """The choice for validation data: the columns and categories that the training data gave."""
    if not isinstance(trained_on, TableRows):
        return replace(choice, finds_levels=False)
    known = trained_on.spec
    features = known.features
    if features is None:  # whatever the order of columns there
        features = [
            c for group in trained_on.column_groups if group.key == "x" for c in group.columns
        ]
    return replace(known, features=features, finds_levels=False)


def check_steps(rows: int, job: Job) -> None:
    """Refuse more steps per epoch than the rows give."""
    full = steps_in_epoch([-(-rows // job.workers)], job.batch_size)
    if job.steps_per_epoch is not None and job.steps_per_epoch > full:
        raise InputError(
            f"`steps_per_epoch` is {job.steps_per_epoch}, but {rows} rows give {full} steps of "
            f"{job.workers} x {job.batch_size} rows"
        )


def model_files(
    model: Any,
    custom_objects: Mapping[str, Any] | None,
    job: Job,
    callbacks: Any = None,
) -> dict[str, bytes]:
    """The model, and what of the user's own it needs, as files for the workers."""
    if callbacks is not None and not isinstance(callbacks, (list, tuple)):
        callbacks = [callbacks]
    _check_callbacks(callbacks or [])
    check_custom_objects(custom_objects)
    if job.model_source == "file":
        custom_objects = with_own_classes(model, custom_objects)
    files = {}
    if callbacks or custom_objects:
        extras: dict[str, Any] = {
            "callbacks": list(callbacks or []),
            "custom_objects": _by_all_names(custom_objects or {}),
        }
        files[EXTRAS] = pickled(
            extras,
            "`callbacks`, `custom_objects`, or what the model has as losses and metrics,",
            [*extras["callbacks"], *extras["custom_objects"].values()],
        )
    if job.model_source == "function":
        return {**files, MODEL_FUNCTION: pickled(model, "the `model` function", [model])}
    from pybackend.model.checks import check_model

    check_model(model, job)
    trains = job.kind == "train"
    return {**files, MODEL_FILE: model_to_bytes(model, format="keras", include_optimizer=trains)}


def check_custom_objects(custom_objects: Any) -> None:
    """Refuse what maps no names to classes or functions."""
    if not isinstance(custom_objects, (Mapping, type(None))):
        raise InputError(
            "`custom_objects` must map names to classes or functions, not "
            f"{type(custom_objects).__name__}"
        )


def with_own_classes(model: Any, custom_objects: Mapping[str, Any] | None) -> dict[str, Any]:
    """Add the classes and functions of the user's own that a model is seen to consist of."""
    from pybackend.model.layers import find_custom_objects

    return {**find_custom_objects(model), **(custom_objects or {})}


def _by_all_names(custom_objects: Mapping[str, Any]) -> dict[str, Any]:
    """Add the names under which classes are registered here: workers know no registrations."""
    keras = sys.modules.get("keras")
    if keras is None:
        return dict(custom_objects)
    registered = {
        keras.saving.get_registered_name(value): value
        for value in custom_objects.values()
        if inspect.isclass(value) or inspect.isfunction(value)
    }
    return {**registered, **custom_objects}


def source_of(model: Any) -> Literal["file", "function"]:
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
        from pybackend.model.callbacks import check_callbacks

        check_callbacks(callbacks)
    elif callbacks:
        name = type(callbacks[0]).__name__
        raise InputError(f"`callbacks` holds {name}, which is not a keras.callbacks.Callback")


def keras_defaults() -> dict[str, Any]:
    """Keras's global settings, which can differ from its own only where Keras is loaded."""
    keras = sys.modules.get("keras")
    if keras is None:
        return {}
    return {
        "floatx": keras.config.floatx(),
        "dtype_policy": keras.config.dtype_policy().name,
        "image_data_format": keras.config.image_data_format(),
    }


def check_shapes(model: Any, datasets: Mapping[str, Any]) -> None:
    """Refuse arrays that do not fit the model's input; the model has loaded TensorFlow anyway."""
    from pybackend.data.rows import to_rows
    from pybackend.model.inputs import check_features, reshape_rows

    for columns in datasets.values():
        if isinstance(columns, dict):
            reshape_rows(to_rows(columns), model)
        elif isinstance(columns, TableRows):
            named = [
                group.key.partition("/")[2]
                for group in columns.column_groups
                if not group.is_target
            ]
            check_features(model, None if named == [""] else dict.fromkeys(named), None)
