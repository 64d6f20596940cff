"""Functions that the R package calls; they return results and failures as plain data.

reticulate passes the text of a Python exception to R, but not its attributes. So each call returns
an envelope with either the value or all details of the failure.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pybackend
from pybackend.core import errors
from pybackend.core.api.calls import EvaluationCall, PredictionCall
from pybackend.core.api.calls import suggest as suggest
from pybackend.core.api.detached_job import DetachedJob, jobs
from pybackend.core.api.display import Tell, relayed_to
from pybackend.core.api.in_process import evaluate_here, predict_here
from pybackend.core.api.result_files import read_model_file, read_result, write_result
from pybackend.core.api.train_result import TrainResult
from pybackend.core.data.files import check_writable
from pybackend.core.data.predictions import Predictions
from pybackend.core.job.call_options import checks
from pybackend.core.job.worker_options import Elastic
from pybackend.core.launchers import SparklyrWorkers as SparklyrWorkers
from pybackend.core.launchers import attach_spark as attach_spark
from pybackend.core.model.serialization import decode_base64, model_from_bytes, save_model
from pybackend.core.words import show, speak
from pybackend.doctor.machine import doctor as doctor
from pybackend.doctor.probe import probe as probe
from pybackend.reporting.reports import report, write_report
from pybackend.sql.connect import connect_dbi as connect_dbi
from pybackend.sql.deploy import augment as augment
from pybackend.sql.operations import SourceQuery as SourceQuery
from pybackend.tuning.grid import ModelFunction
from pybackend.tuning.pruning import Mode
from pybackend.tuning.trials import Trial, Trials


def capture(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Call a function: return ``{"ok": True, "value": ...}`` or ``{"ok": False, "error": {...}}``.

    Only errors that tfdist itself raises are turned into data. Ctrl-C and programming errors
    pass through.
    """
    try:
        return {"ok": True, "value": _show_nul(fn(*args, **kwargs))}
    except errors.TfdistError as error:
        return {"ok": False, "error": error.to_dict()}


def capture_shown(tell: Tell, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a function like `capture`, and pass its progress to an R function for display."""
    with relayed_to(lambda kind, fields: tell(kind, _show_nul(fields))):
        return capture(fn, *args, **kwargs)


def _show_nul(value: Any) -> Any:
    r"""Replace NULs in text by ``\0``: R cannot store them, and passing one to R would crash it."""
    if isinstance(value, str):
        return value.replace("\0", r"\0")
    if type(value) is dict:
        return {key: _show_nul(item) for key, item in value.items()}
    if type(value) is list:
        return [_show_nul(item) for item in value]
    return value


def answer(request: str) -> str:
    """Run `capture` in a separate process; the request and the answer are JSON.

    For calls that must not start Python inside R: Python would copy the environment at that time,
    and a TF_CONFIG that R sets later would never reach TensorFlow.
    """
    speak("R")
    call = json.loads(request)
    fn = getattr(pybackend, call["call"])
    return json.dumps(capture(fn, *call["arguments"], **call["named"]))


def check_options(values: dict[str, Any], shown: dict[str, str], takes_elastic: bool) -> None:
    """Check options of a call before it looks at its data.

    ``shown`` has the names of the options in errors. With ``takes_elastic``, ``workers`` may be an
    `Elastic`.
    """
    known = checks()
    for name, value in values.items():
        is_elastic = takes_elastic and isinstance(value, Elastic)
        if value is not None and not is_elastic and name in known:
            known[name](shown[name], value)


def model_of(result: Any) -> Any:
    return result.model


def read_model(uri: str, **options: Any) -> Any:
    """Read the model at a ``model_uri`` from training, with the options of `load_model`."""
    return model_from_bytes(read_model_file(uri), **options)


def read_model_text(uri: str) -> str:
    """Return the model that a training run wrote to ``model_uri``, as base64 text."""
    return base64.b64encode(read_model_file(uri)).decode("ascii")


def describe_weights(result: Any) -> dict[str, str]:
    """Return what `restore_model` needs from a `TrainResult` that has only weights."""
    return {"inputs": json.dumps(result.inputs), "digest": result.workers[0].weights_sha256}


def restore_model(model: Any, weights: dict[str, str]) -> Any:
    """Load the trained weights and optimizer state into a model that its function rebuilt.

    ``weights`` is what `describe_weights` returned, with ``text``, the weights file in base64, and
    ``sha256``, its digest.
    """
    from pybackend.core.job.job import WEIGHTS
    from pybackend.core.model.file_checks import check_digest
    from pybackend.core.model.transfer import restore

    file = decode_base64(weights["text"])
    check_digest(file, weights["sha256"])
    return restore(model, file, WEIGHTS, json.loads(weights["inputs"]), weights["digest"])


def copy_model(uri: str, path: str) -> None:
    """Copy the model file at a ``model_uri`` to a path, with the checks of `save_model`."""
    save_model(read_model_text(uri), path)


def write_onnx(model: Any, path: str) -> float:
    check_writable(path, "path")
    from pybackend.core.model.onnx import write_onnx

    return write_onnx(model, Path(path))


def match_levels(model: Any, levels: list[str]) -> list[str] | None:
    """Return the levels of the label used in training if the model has as many classes."""
    from pybackend.core.model.inputs_outputs import count_classes, has_logits, list_outputs

    outputs = list_outputs(model)
    classes = count_classes(model, outputs)
    if has_logits(model, outputs):
        classes = max(2, classes)
    return levels if len(levels) == classes else None


def predict_rows(model: Any, rows: Any, batch_size: int) -> Any:
    """Predict in this process from arrays, checked as in training; return the model's outputs."""
    call = PredictionCall(
        model=model,
        options={"batch_size": batch_size, "type": "raw", "on_missing": "error", "verbose": 0},
    )
    try:
        return predict_here(call, rows)
    except errors.InputError as error:
        raise errors.InputError(str(error).replace("`x`", "`newdata`")) from error


def evaluate_rows(model: Any, data: Any, batch_size: int) -> dict[str, Any]:
    """Evaluate in this process; ``data`` contains arrays, as for a training run."""
    call = EvaluationCall(model=model, options={"batch_size": batch_size, "verbose": 0})
    return evaluate_here(call, data)


def shape_columns(
    model: Any,
    outputs: Any,
    kind: str | None,
    levels: list[str] | None,
    levels_of: dict[str, list[str]] | None = None,
) -> dict[str, dict[str, Any]]:
    """Return the columns that `predict_spark` would add, with classes as codes.

    ``levels_of`` has, of several outputs, the names of the classes of each that has classes. The
    keys are outputs ("" for a single one); the values have ``names`` and ``columns`` of equal
    length, and ``levels`` of the class if the first column is the class, else None.
    """
    from keras import tree

    from pybackend.core.api.model_columns import check_levels, divide_predictions, predictions_of

    predictions = predictions_of(model, kind, None, check_levels(levels))
    flat = tree.flatten(outputs)
    if len(predictions.outputs) == 1:
        return {"": _show_predictions(predictions, flat)}
    parts = divide_predictions(model, predictions, levels_of or {})
    pairs = zip(parts.items(), flat, strict=True)
    return {name: _show_predictions(part, [numbers]) for (name, part), numbers in pairs}


def _show_predictions(predictions: Predictions, outputs: list[Any]) -> dict[str, Any]:
    levels = None
    if predictions.has_class:
        codes = range(max(2, predictions.outputs[0].shape[0] or 0))
        levels = [str(name) for name in predictions.levels or codes]
    return {
        "names": [field.name for field in predictions.fields],
        "columns": predictions.columns(outputs),
        "levels": levels,
    }


def check_levels(model: Any, levels: list[str]) -> None:
    """Reject label levels that the model's loss cannot distinguish, or uses as numbers."""
    from pybackend.core.model.labels import check_levels

    check_levels(model, levels, "data")


def check_inputs(model: Any, names: list[str] | dict[str, list[str]]) -> None:
    """Reject features with more or fewer numbers per row than the model's input has."""
    from pybackend.core.model.inputs_outputs import check_feature_names

    check_feature_names(model, names if isinstance(names, dict) else {"": names})


def find_text_inputs(model: Any) -> list[str] | None:
    """Return the names of the model's inputs that take text; None if its inputs are unknown."""
    from pybackend.core.model.inputs_outputs import find_text_inputs

    return find_text_inputs(model)


def list_columns(path: str | list[str], tfrecord_spec: dict[str, str] | None = None) -> list[str]:
    from pybackend.core.data.files import as_paths
    from pybackend.core.data.sources import open_row_files

    names: list[str] = open_row_files(as_paths(path), tfrecord_spec, "data").schema.names
    return names


def pick_columns(model: Any, features: list[str]) -> str | list[str]:
    """Return one name as text, for a column of arrays, unless the model takes a single number."""
    shapes = [tuple(tensor.shape[1:]) for tensor in getattr(model, "inputs", None) or ()]
    takes_number = len(shapes) == 1 and None not in shapes[0] and math.prod(shapes[0]) == 1
    return features[0] if len(features) == 1 and not takes_number else features


def describe_sql(made: Any) -> dict[str, Any]:
    """Return a `SqlModel` as plain data, with each of its rows of weights as an array."""
    return {
        **{name: getattr(made, name) for name in ("dialect", "query", "weights")},
        "part": [part.name for part in made.parts for _ in part.numbers],
        "place": [place for part in made.parts for place in range(len(part.numbers))],
        "numbers": [row for part in made.parts for row in part.numbers],
    }


def list_jobs(folder: str | None) -> list[dict[str, Any]]:
    return [job.to_dict() for job in jobs(folder)]


def job_status(job: DetachedJob) -> str:
    return job.status


def job_result(job: DetachedJob, seconds: float | None, verbose: int | None) -> Any:
    try:
        return job.result(seconds, verbose=verbose)
    except TimeoutError as error:
        raise errors.ClusterError(f"{error}; it goes on") from None


def model_function(
    build: Callable[..., Any], known: list[str], needed: list[str], takes_any: bool
) -> ModelFunction:
    return ModelFunction(build, known, needed, takes_any)


def describe_trial(trial: Trial) -> dict[str, Any]:
    """Return a `Trial` as plain data, without its result."""
    known = {one.name: getattr(trial, one.name) for one in fields(trial) if one.name != "stored"}
    return {**known, "arguments": _describe_values(trial.arguments)}


_OF_TRIALS = ("arguments", "metric", "mode", "parallelism", "seconds")


def describe_trials(trials: Trials) -> dict[str, Any]:
    return {
        "records": [_describe_values(record) for record in trials.records],
        **{name: getattr(trials, name) for name in _OF_TRIALS},
    }


def find_trial(
    trials: Trials, number: int | None, metric: str | None, mode: Mode | None
) -> dict[str, Any]:
    """Return a trial's arguments and result; without a number, those of `Trials.best`."""
    if number is None:
        trial = trials.best(metric, mode)
    elif number > len(trials):
        raise errors.InputError(f"`trial` is {number}, but there are {len(trials)} trials")
    else:
        trial = trials[number - 1]
    result = trial.result
    if result is None:
        raise errors.InputError(f"trial {trial.number} has no model: {trial.error}")
    return {"arguments": trial.arguments, "result": result}


def _describe_values(values: dict[str, Any]) -> dict[str, Any]:
    plain = (str, bool, int, float, type(None), list)
    return {n: v if isinstance(v, plain) else show(v) for n, v in values.items()}


def save_result(record: str, model: str, path: str, changes: dict[str, Any]) -> None:
    """Write a fit as `TrainResult.save` writes a result; ``changes`` are values added by R."""
    write_result(record, model, Path(path), changes)


def load_result(path: str, custom_objects: Any, safe_mode: bool) -> dict[str, Any]:
    """Read the file of `save_result`: the result, and what R stored about its label."""
    result, others = read_result(TrainResult, Path(path), custom_objects, safe_mode)
    return {"result": result, "label": others.get("label"), "labels": others.get("labels")}


def report_record(record: str, model: Any, path: str, title: str | None) -> str:
    """Write the report of a fit: ``record`` is `TrainResult.record`, or a part of it."""
    return str(write_report(json.loads(record), model, path, title))


def report_failure(
    *, path: str, title: str | None, message: str, timeline: list[dict[str, Any]], **fields: Any
) -> str:
    """Write the report of an error that `capture` described."""
    log, traceback = tuple(fields.pop("log")), fields.pop("traceback") or ""
    # The message begins with the reason; the rest of it is in the other fields.
    failure = errors.Failure(
        message=message.partition("\n")[0], log=log, traceback=traceback, **fields
    )
    moments = [errors.Moment(**{**one, "rank": int(one["rank"])}) for one in timeline]
    return str(report(errors.WorkerFailedError([failure], (), moments), path, title=title))
