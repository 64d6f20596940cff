"""The model that a training run returns: decoded from the workers' messages, or saved to a file."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle

from pybackend.core.api.checkpoints import has_checkpoint
from pybackend.core.data.files import check_writable, read_file, write_whole
from pybackend.core.errors import InputError, SerializationError
from pybackend.core.job.pickling import pickle_value
from pybackend.core.job.storage_options import Checkpoint, pointing_to
from pybackend.core.model.file_checks import check_digest
from pybackend.core.model.serialization import model_from_bytes
from pybackend.core.quiet import import_tensorflow
from pybackend.core.words import show

_SUFFIXES = (".h5", ".keras")


def check_path(path: Any, wanted: str) -> Path:
    """Return the path to which a model will be written, before anything is computed.

    Parameters
    ----------
    wanted
        What it must name, for the message: ``"a file, such as 'model.h5'"``.

    Raises
    ------
    InputError
        It names nothing, or cannot be written.
    """
    if not isinstance(path, (str, os.PathLike)) or not Path(path).name:
        raise InputError(f"`path` must name {wanted}, not {show(path)}")
    check_writable(str(Path(path)), "path")
    return Path(path)


def save_file(
    path: Path, kind: str, read: Callable[[], bytes], find_model: Callable[[], Any]
) -> Path:
    """Write a model to ``*.h5`` or ``*.keras``; Keras converts it from another format.

    Parameters
    ----------
    kind
        Format of the model file that the workers sent; ``"weights.h5"`` has only weights.
    read, find_model
        Return the content of this file, and the model.
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
    """Read the model that a training run wrote to the ``uri`` of `ModelOptions`.

    Raises
    ------
    SerializationError
        The model is missing, or cannot be read.
    """
    try:
        return read_file(uri)
    except OSError as error:
        raise SerializationError(f"the model at {uri} cannot be read: {error}") from error


@dataclass(frozen=True)
class Decoder:
    """Build a model from its file or its weights. It can be pickled.

    Attributes
    ----------
    kind, digest
        As `TrainResult.model_format` and `TrainResult.model_sha256`.
    make_copy
        Returns the model as it was before training; None if the file is enough.
    inputs, weights
        The workers' description of the model, for `pybackend.core.model.transfer.restore`.
    """

    kind: str
    digest: str
    make_copy: Callable[[], Any] | None
    custom_objects: Mapping[str, Any]
    safe_mode: bool
    inputs: Any
    weights: str
    checkpoint: Checkpoint | None
    verbose: int

    def __call__(self, data: bytes) -> Any:
        """Return the model, given the content of its file or of its weights file."""
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
