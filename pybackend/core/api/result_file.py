"""Write a whole result to a file, and read it in later sessions, in Python and in R."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from pybackend.core.api.returned_model import Decoder, read_model_file
from pybackend.core.data.files import check_writable, write_whole
from pybackend.core.errors import InputError, Moment, SerializationError
from pybackend.core.job.codec import read_fields
from pybackend.core.job.report import Audit, Generation, Restart, StepTimes, WorkerReport
from pybackend.core.words import either, show

Result = TypeVar("Result")
SUFFIX = ".json"
_FORMAT, _VERSION = "tfdist result", 1
_NESTED = {"step_times": StepTimes, "audit": Audit}


def write_result(
    record: str, model_base64: str, path: Path, changes: Mapping[str, Any] | None = None
) -> Path:
    """Write a result's record (`TrainResult.record`) and its model, atomically.

    ``changes`` replace values of the record.

    Raises
    ------
    InputError
        The name of the file does not end in ``.json``, or it cannot be written.
    """
    if path.suffix != SUFFIX:
        raise InputError(f"name the file *{SUFFIX}, not {show(path.name)}")
    check_writable(str(path), "path")
    own = {**json.loads(record), **(changes or {})}
    values = {"format": _FORMAT, "version": _VERSION, **own}
    write_whole(str(path), json.dumps({**values, "model_base64": model_base64}).encode())
    return path


def read_result(
    kind: type[Result],
    path: Path,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
) -> tuple[Result, dict[str, Any]]:
    """Read a result that `write_result` wrote, and the other values in the file.

    Parameters
    ----------
    kind
        `TrainResult`; its `load` documents the rest.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except OSError as error:
        raise InputError(f"`path` cannot be read: {error}") from error
    if text.startswith((b"\x1f\x8b", b"X\n")):
        raise InputError(f"{path} is a file of R's saveRDS(): read it in R with readRDS(path)")
    if text.startswith((b"\x89HDF", b"PK")):
        raise InputError(
            f"{path} is a model file, not a result file "
            f"(`{either('result.save(', 'write_model(fit, ')}{show('fit.json')})` writes one): "
            f"read the model with {either('', 'keras3::')}load_model(path)"
        )
    try:
        return _read(kind, json.loads(text), custom_objects, safe_mode)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SerializationError(
            f"{path} is not a result file, or it is damaged ({type(error).__name__}: {error})"
        ) from error


def _read(
    kind: Any, values: Any, custom_objects: Mapping[str, Any] | None, safe_mode: bool
) -> tuple[Any, dict[str, Any]]:
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise ValueError(f"its format is not {show(_FORMAT)}")
    if values["version"] != _VERSION:
        raise ValueError(f"its version is {values['version']}, not {_VERSION}")
    names = [one.name for one in fields(kind) if one.name not in ("content", "decode", "fetch")]
    known: dict[str, Any] = {name: values[name] for name in names if name in values}
    known["content"] = base64.b64decode(values["model_base64"], validate=True)
    known["history"] = {str(k): [_as_number(v) for v in row] for k, row in known["history"].items()}
    known["metrics"] = {str(k): _as_number(v) for k, v in known["metrics"].items()}
    known["workers"] = [_read_worker(worker) for worker in known["workers"]]
    known["generations"] = [
        read_fields(Generation, generation) for generation in known["generations"]
    ]
    known["restarts"] = [read_fields(Restart, restart) for restart in known["restarts"]]
    known["timeline"] = [read_fields(Moment, moment) for moment in known.get("timeline", [])]
    if isinstance(freq := known.get("validation_freq"), list):
        known["validation_freq"] = tuple(freq)
    result = kind(**known)
    decode = None
    if result.model_format in ("h5", "keras"):
        decode = Decoder(
            kind=result.model_format,
            digest=result.model_sha256,
            make_copy=None,
            custom_objects=custom_objects or {},
            safe_mode=safe_mode,
            inputs=result.inputs,
            weights="",
            checkpoint=None,
            verbose=1,
        )
    others = {n: value for n, value in values.items() if n not in (*names, "model_base64")}
    return replace(result, decode=decode, fetch=read_model_file), others


def _read_worker(values: Mapping[str, Any]) -> WorkerReport:
    names = {one.name for one in fields(WorkerReport)}
    given = {name: value for name, value in values.items() if name in names}
    nested = {name: given.pop(name, None) for name in _NESTED}
    report = read_fields(WorkerReport, given)
    found: dict[str, Any] = {
        name: read_fields(kind, nested[name])
        for name, kind in _NESTED.items()
        if nested[name] is not None
    }
    return replace(report, **found)


def _as_number(value: Any) -> Any:
    """Convert a value to a number; JSON has NaN and infinity as text."""
    if isinstance(value, list):
        return [_as_number(one) for one in value]
    return float(value) if isinstance(value, str) else value
