"""What the R package calls: results and failures as plain data.

reticulate passes R the text of a Python exception, but not its attributes; so each call returns an
envelope with either the value or everything about the failure.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import pybackend
from pybackend.api.result import read_model_file
from pybackend.doctor.machine import doctor
from pybackend.doctor.probe import probe
from pybackend.errors import PeerLostError, TfdistError, WorkerFailedError
from pybackend.launchers import SparklyrWorkers, attach_spark
from pybackend.model.serialization import model_from_bytes, save_model
from pybackend.sql.augment import augment
from pybackend.sql.dbi import connect_dbi

__all__ = [
    "SparklyrWorkers",
    "answer",
    "attach_spark",
    "augment",
    "capture",
    "check_inputs",
    "connect_dbi",
    "copy_model",
    "describe_sql",
    "doctor",
    "list_columns",
    "match_levels",
    "pick_columns",
    "probe",
    "read_model",
]


def capture(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Call a function: ``{"ok": True, "value": ...}`` or ``{"ok": False, "error": {...}}``.

    Only errors that tfdist itself raises are turned into data. Ctrl-C and programming errors
    pass through.
    """
    try:
        return {"ok": True, "value": fn(*args, **kwargs)}
    except TfdistError as error:
        return {"ok": False, "error": _describe(error)}


def answer(request: str) -> str:
    """`capture` in a separate process: JSON in, JSON out.

    For calls that must not start Python inside R: it would keep the environment of that moment,
    and a TF_CONFIG set by R later would never reach TensorFlow.
    """
    call = json.loads(request)
    fn = getattr(pybackend, call["call"])
    return json.dumps(capture(fn, *call["arguments"], **call["named"]))


def model_of(result: Any) -> Any:
    """The model of a `TrainResult`."""
    return result.model


def read_model(uri: str, **options: Any) -> Any:
    """Read the model that a training wrote to ``model_uri``; options of `model_from_bytes`."""
    return model_from_bytes(read_model_file(uri), **options)


def copy_model(uri: str, path: str) -> None:
    """Write the model file of a ``model_uri`` to a path, with the checks of `save_model`."""
    save_model(base64.b64encode(read_model_file(uri)).decode("ascii"), path)


def match_levels(model: Any, levels: list[str]) -> list[str] | None:
    """Return the levels of the training's label if the model distinguishes as many classes."""
    from pybackend.model.outputs import count_classes, list_outputs

    return levels if len(levels) == count_classes(model, list_outputs(model)) else None


def check_inputs(model: Any, names: list[str] | dict[str, list[str]]) -> None:
    """Reject features that are more or fewer numbers per row than the model's input takes."""
    from pybackend.model.inputs import check_feature_names

    check_feature_names(model, names if isinstance(names, dict) else {"": names})


def list_columns(path: str, tfrecord_spec: dict[str, str] | None = None) -> list[str]:
    """The names of the columns of Parquet or TFRecord files."""
    from pybackend.data.sources import open_row_files

    names: list[str] = open_row_files(path, tfrecord_spec, "data").schema.names
    return names


def pick_columns(model: Any, features: list[str]) -> str | list[str]:
    """One name is that of a column of arrays, unless the model takes a single number."""
    from pybackend.sql.lowering import size_of

    shapes = [tuple(tensor.shape[1:]) for tensor in getattr(model, "inputs", None) or ()]
    takes_number = len(shapes) == 1 and None not in shapes[0] and size_of(shapes[0]) == 1
    return features[0] if len(features) == 1 and not takes_number else features


def describe_sql(made: Any) -> dict[str, Any]:
    """A `SqlModel` as plain data, with each of its rows of weights as an array."""
    rows = [
        (part.name, place, row) for part in made.parts for place, row in enumerate(part.numbers)
    ]
    return {
        "dialect": made.dialect,
        "query": made.query,
        "weights": made.weights,
        "part": [row[0] for row in rows],
        "place": [row[1] for row in rows],
        "numbers": [row[2] for row in rows],
    }


def _describe(error: TfdistError) -> dict[str, Any]:
    failed = error if isinstance(error, WorkerFailedError) else None
    placed = error if isinstance(error, (WorkerFailedError, PeerLostError)) else None
    return {
        "class": type(error).__name__,
        "message": str(error),
        "rank": placed.rank if placed else None,
        "host": placed.host if placed else None,
        "exception_type": failed.exception_type if failed else None,
        "traceback": failed.worker_traceback if failed else None,
        "log": failed.log if failed else [],
    }
