"""Files of a result: its model, and the whole result for later sessions, in Python and in R."""

from __future__ import annotations

import base64
import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import cloudpickle

from pybackend.core.api.checkpoints import has_checkpoint
from pybackend.core.data.files import check_writable, read_file, write_whole
from pybackend.core.errors import InputError, Moment, SerializationError
from pybackend.core.job.codec import read_fields
from pybackend.core.job.pickling import pickle_value
from pybackend.core.job.report import Audit, Generation, Restart, StepTimes, WorkerReport
from pybackend.core.job.storage_options import Checkpoint, pointing_to
from pybackend.core.model.file_checks import check_digest
from pybackend.core.model.serialization import model_from_bytes
from pybackend.core.quiet import import_tensorflow
from pybackend.core.words import either, show

Result = TypeVar("Result")
SUFFIX = ".json"
_FORMAT, _VERSION = "tfdist result", 1
_LISTS: dict[str, Any] = {"generations": Generation, "restarts": Restart, "timeline": Moment}
_NESTED: dict[str, Any] = {"step_times": StepTimes, "audit": Audit}
# Useless without the session.
_LEFT_OUT_OF_WORKERS = {"value", "inputs", "failure"}
_SUFFIXES = (".h5", ".keras")


def write_result(
    record: str, model_base64: str, path: Path, changes: Mapping[str, Any] | None = None
) -> Path:
    """Write a result's record (`TrainResult.record`), with ``changes``, and its model."""
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

    ``kind`` is `TrainResult`; its `load` documents the rest.
    """
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        raise InputError(f"there is no file {path}") from None
    except OSError as error:
        raise InputError(f"`path` cannot be read: {error}") from error
    # RDS, compressed and not.
    if text.startswith((b"\x1f\x8b", b"X\n")):
        raise InputError(f"{path} is a file of R's saveRDS(): read it in R with readRDS(path)")
    # HDF5, and the zip file of Keras.
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
    names = [one.name for one in fields(kind) if one.name not in ("content", "decode")]
    known: dict[str, Any] = {name: values[name] for name in names if name in values}
    known["content"] = base64.b64decode(values["model_base64"], validate=True)
    known["history"] = {str(k): [_as_number(v) for v in row] for k, row in known["history"].items()}
    known["metrics"] = {str(k): _as_number(v) for k, v in known["metrics"].items()}
    known["workers"] = [_read_worker(worker) for worker in known["workers"]]
    for name, part in _LISTS.items():
        known[name] = [read_fields(part, one) for one in known.get(name, [])]
    if isinstance(freq := known.get("validation_freq"), list):
        known["validation_freq"] = tuple(freq)
    result, decode = kind(**known), None
    if result.model_format in ("h5", "keras"):
        made = (result.model_format, result.model_sha256, custom_objects or {}, safe_mode)
        decode = Decoder(*made, result.inputs)
    others = {n: value for n, value in values.items() if n not in (*names, "model_base64")}
    return replace(result, decode=decode), others


def _read_worker(values: Mapping[str, Any]) -> WorkerReport:
    names = {one.name for one in fields(WorkerReport)}
    given = {name: value for name, value in values.items() if name in names}
    nested = {name: given.pop(name, None) for name in _NESTED}
    found = {k: read_fields(_NESTED[k], one) for k, one in nested.items() if one is not None}
    return replace(read_fields(WorkerReport, given), **found)


def _as_number(value: Any) -> Any:
    """Convert a value to a number; JSON has NaN and infinity as text."""
    if isinstance(value, list):
        return [_as_number(one) for one in value]
    return float(value) if isinstance(value, str) else value


def describe_worker(worker: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    known = {name: value for name, value in worker.items() if name not in _LEFT_OUT_OF_WORKERS}
    return {**known, "rows_per_second": _find_throughput(worker, fields)}


def _find_throughput(worker: Mapping[str, Any], fields: Mapping[str, Any]) -> float | None:
    """Return a worker's rows per second during its steps, including waiting.

    None if the duration of the steps is not known, or if the number of workers changed.
    """
    times, steps = worker["step_times"], worker["steps"]
    if not times or not steps or len(set(fields["workers_by_epoch"])) > 1:
        return None
    seconds = sum(times[part] for part in ("data", "compute", "communication", "waiting"))
    rows = worker["rows"] * fields["epochs"] / steps
    # With `steps_per_epoch` an epoch does not use all rows.
    most = (fields.get("settings") or {}).get("batch_size")
    return min(rows, most or math.inf) / seconds if seconds > 0 else None


def make_plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(name): make_plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [make_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value if isinstance(value, (str, int, float, type(None))) else str(value)


def check_path(path: Any, wanted: str) -> Path:
    """Return the path to which a model will be written, before anything is computed.

    ``wanted`` is what it must name, for the message: ``"a file, such as 'model.h5'"``.
    """
    if not isinstance(path, (str, os.PathLike)) or not Path(path).name:
        raise InputError(f"`path` must name {wanted}, not {show(path)}")
    check_writable(str(Path(path)), "path")
    return Path(path)


def save_file(
    path: Path, kind: str, read: Callable[[], bytes], find_model: Callable[[], Any]
) -> Path:
    """Write a model to ``*.h5`` or ``*.keras``; Keras converts it from another format.

    ``kind`` is the format of the file that the workers sent, whose content ``read`` returns;
    ``"weights.h5"`` has only weights.
    """
    if path.name.endswith(f".{kind}"):
        write_whole(str(path), read())
        return path
    if path.suffix not in _SUFFIXES:
        raise InputError(
            f"name the file {show(path.with_suffix('.' + kind).name)}, or *.h5 or *.keras, or "
            f"*.json for the whole result, not {show(path.name)}"
        )
    from pybackend.core.model.serialization import save_model

    return save_model(find_model(), path, include_optimizer=True)


def export_model(model: Any, path: Path) -> Path:
    """Write a SavedModel atomically, for `TrainResult.export`."""
    from pybackend.core.model.serialization import silence_keras

    path.parent.mkdir(parents=True, exist_ok=True)
    # In the same folder: only within a file system is a rename atomic.
    with tempfile.TemporaryDirectory(prefix=f".{path.name}-", dir=path.parent) as folder:
        made = Path(folder) / path.name
        try:
            with silence_keras():
                model.export(made, verbose=False)
        except Exception as error:  # tracing runs the code of custom layers
            raise SerializationError(
                f"Keras cannot export the model {show(model.name)}: {error}"
            ) from error
        made.replace(path)  # may replace an empty folder
    return path


def check_new_folder(path: Path) -> None:
    """Reject a path for a SavedModel if it exists and is not an empty folder."""
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(
            f"{show(str(path))} exists and is not an empty folder: choose a new folder"
        )


def read_model_file(uri: str) -> bytes:
    """Read the model that a training run wrote to the ``uri`` of `ModelOptions`."""
    try:
        return read_file(uri)
    except OSError as error:
        raise SerializationError(f"the model at {uri} cannot be read: {error}") from error


@dataclass(frozen=True)
class Decoder:
    """Build a model from its file or its weights. It can be pickled.

    ``kind`` and ``digest`` are `TrainResult.model_format` and `TrainResult.model_sha256`.
    ``make_copy`` returns the model as it was before training; None if the file is enough.
    ``inputs`` and ``weights`` are the workers' description of the model, for
    `pybackend.core.model.transfer.restore`.
    """

    kind: str
    digest: str
    custom_objects: Mapping[str, Any]
    safe_mode: bool
    inputs: Any
    make_copy: Callable[[], Any] | None = None
    weights: str = ""
    checkpoint: Checkpoint | None = None
    verbose: int = 1

    def __call__(self, data: bytes) -> Any:
        import_tensorflow(self.verbose)
        with pointing_to(self.checkpoint, partial(has_checkpoint, self.checkpoint)):
            if self.make_copy is None:
                return model_from_bytes(
                    data,
                    custom_objects=self.custom_objects,
                    safe_mode=self.safe_mode,
                    sha256=self.digest,
                )
            from pybackend.core.model.transfer import restore

            check_digest(data, self.digest)
            return restore(self.make_copy(), data, self.kind, self.inputs, self.weights)

    def __reduce__(self) -> Any:
        # Functions and classes of a session are sent as code, as to the workers.
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        owners = [part for part in (self.make_copy, *self.custom_objects.values()) if part]
        return _restore, (pickle_value(values, "the result's model", owners),)


def _restore(content: bytes) -> Decoder:
    # Only called when the user unpickles a result; sockets never carry such a pickle.
    return Decoder(**cloudpickle.loads(content))
