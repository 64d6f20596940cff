"""What the R package calls: results and failures as plain data.

reticulate hands R the text of a Python exception, not its attributes; so each call returns an
envelope that holds either the value or everything about the failure.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from typing import Any

import numpy as np

import pybackend
from pybackend.data.files import content_of
from pybackend.doctor.machine import doctor
from pybackend.doctor.probe import probe
from pybackend.errors import PeerLostError, SerializationError, TfdistError, WorkerFailedError
from pybackend.launchers import SparklyrWorkers, attach_spark
from pybackend.model.serialization import model_from_bytes, save_model

__all__ = [
    "SparklyrWorkers",
    "answer",
    "attach_spark",
    "capture",
    "doctor",
    "levels_told_by",
    "model_at",
    "probe",
    "row_major",
    "save_model_at",
]


def capture(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """Call a function: ``{"ok": True, "value": ...}`` or ``{"ok": False, "error": {...}}``.

    Only errors that tfdist itself raises are turned into data. Ctrl-C and programming errors
    pass through.
    """
    try:
        return {"ok": True, "value": fn(*args, **kwargs)}
    except TfdistError as error:
        return {"ok": False, "error": _described(error)}


def answer(request: str) -> str:
    """`capture` for a process of its own: JSON in, JSON out.

    For calls that must not start Python inside R: it would keep the environment of that moment,
    and a TF_CONFIG set by R later would never reach TensorFlow.
    """
    asked = json.loads(request)
    fn = getattr(pybackend, asked["call"])
    return json.dumps(capture(fn, *asked["arguments"], **asked["named"]))


def row_major(array: Any, dtype: str | None = None) -> Any:
    """A C-ordered numpy array with the same values by index; R's arrays are column-major."""
    return np.ascontiguousarray(array, dtype=dtype)


def model_at(uri: str, **options: Any) -> Any:
    """The model that a training has written to its ``model_uri``; options of `model_from_bytes`."""
    return model_from_bytes(_content_at(uri), **options)


def save_model_at(uri: str, path: str) -> None:
    """Write the model file of a ``model_uri`` to a path, with the checks of `save_model`."""
    save_model(base64.b64encode(_content_at(uri)).decode("ascii"), path)


def levels_told_by(model: Any, levels: list[str]) -> list[str] | None:
    """The levels of the training's label, where the model tells as many classes apart."""
    from pybackend.model.outputs import count_classes, list_outputs

    return levels if len(levels) == count_classes(model, list_outputs(model)) else None


def _content_at(uri: str) -> bytes:
    try:
        return content_of(uri)
    except OSError as error:
        raise SerializationError(f"the model at {uri} cannot be read: {error}") from error


def _described(error: TfdistError) -> dict[str, Any]:
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
