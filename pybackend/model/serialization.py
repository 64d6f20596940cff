"""Keras models to and from bytes, base64 text and files.

Loading is safe by default: a file that carries Python code (a ``Lambda`` layer, say) is refused
unless ``safe_mode=False``, and files written by Keras 2 are refused always, because only the
legacy package could read them and it executes such code.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import logging
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pybackend.errors import InputError, SerializationError
from pybackend.model.hdf5 import (
    drop_optimizer_state,
    keras_version,
    refuse_endless,
    take_optimizer_state,
    write_compile_settings,
)
from pybackend.model.quiet import import_tensorflow

Format = Literal["h5", "keras"]
_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_ZIP_MAGIC = b"PK\x03\x04"


def model_to_bytes(model: Any, *, format: Format = "h5", include_optimizer: bool = False) -> bytes:
    """Encode a Keras model with its weights and compile settings.

    Parameters
    ----------
    model
        A Keras 3 model.
    format
        ``"h5"`` (HDF5: functional and Sequential models) or ``"keras"`` (any serializable model).
    include_optimizer
        Whether the optimizer's state (momenta, step count) travels too. The choice of optimizer
        and its settings always do.

    Raises
    ------
    InputError
        Where ``model`` is no Keras model or ``format`` is unknown.
    SerializationError
        Where Keras cannot encode the model.
    """
    if format not in ("h5", "keras"):
        raise InputError(f"`format` must be 'h5' or 'keras', not {format!r}")
    _check_keras_model(model)
    if format == "h5" and not type(model).__module__.startswith("keras."):
        # Keras writes it without a word, and then cannot read it.
        raise SerializationError(
            f"HDF5 holds functional and Sequential models, but {model.name!r} is of a class of "
            f"its own ({type(model).__qualname__}): use format='keras'"
        )
    import keras

    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder, _quiet_keras():
        path = Path(folder) / f"model.{format}"
        try:
            # For HDF5 the compile settings are written below: Keras, writing them, removes the
            # optimizer from the model's own settings, which the next `.keras` file then lacks.
            keras.saving.save_model(model, path, include_optimizer=False)
        except Exception as error:
            raise SerializationError(
                f"Keras cannot write the model {model.name!r} as .{format}: {error}"
            ) from error
        if path.suffix == ".h5":
            write_compile_settings(path, model, include_optimizer)
        elif not include_optimizer:
            drop_optimizer_state(path)
        return path.read_bytes()


def model_from_bytes(
    data: bytes,
    *,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
    sha256: str | None = None,
    compile: bool = True,
) -> Any:
    """Decode what `model_to_bytes` wrote; the format is recognized from the content.

    Parameters
    ----------
    data
        The content of an ``.h5`` or ``.keras`` file.
    custom_objects
        Name to class or function, for layers, losses and metrics of your own.
    safe_mode
        False allows a model that carries Python code to run it. Only for files you trust.
    sha256
        Where given, the hexadecimal digest that ``data`` must have.
    compile
        Whether to compile the model as it was when saved.

    Returns
    -------
    keras.Model

    Raises
    ------
    SerializationError
        Where the data are truncated, corrupted, written by Keras 2, or need ``custom_objects``.
    """
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InputError(f"expected the bytes of a model file, not {type(data).__name__}")
    data = bytes(data)
    _check_digest(data, sha256)
    suffix = _recognize(data)
    import_tensorflow()
    import keras

    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder, _quiet_keras():
        path = Path(folder) / f"model{suffix}"
        path.write_bytes(data)
        if sha256 is None and suffix == ".h5":
            refuse_endless(path)
        _refuse_foreign(path)
        try:
            state = take_optimizer_state(path) if path.suffix == ".h5" else []
            model = keras.saving.load_model(
                path,
                custom_objects=dict(custom_objects or {}),
                compile=compile,
                safe_mode=safe_mode,
            )
            if state and model.compiled:
                model.optimizer.build(model.trainable_variables)
                for variable, value in zip(model.optimizer.variables, state, strict=True):
                    variable.assign(value)
            return model
        except Exception as error:
            raise SerializationError(
                f"Keras cannot load this model ({len(data)} bytes, {suffix}): {error}. "
                "Name layers, losses and metrics of your own in `custom_objects`; "
                "only for a file you trust, `safe_mode=False` lets it run code that it carries."
            ) from error


def model_to_base64(model: Any, *, format: Format = "h5", include_optimizer: bool = False) -> str:
    """Encode a Keras model as base64 text; parameters and errors as in `model_to_bytes`."""
    data = model_to_bytes(model, format=format, include_optimizer=include_optimizer)
    return base64.b64encode(data).decode("ascii")


def model_from_base64(
    text: str,
    *,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
    sha256: str | None = None,
    compile: bool = True,
) -> Any:
    """Decode base64 text of a model file; parameters and errors as in `model_from_bytes`."""
    return model_from_bytes(
        decode_base64(text),
        custom_objects=custom_objects,
        safe_mode=safe_mode,
        sha256=sha256,
        compile=compile,
    )


def save_model(model: Any, path: str | Path, *, include_optimizer: bool = False) -> Path:
    """Write a Keras model, or the base64 text of one, to an ``.h5`` or ``.keras`` file.

    The file appears complete or not at all. Errors as in `model_to_bytes`.
    """
    path = Path(path)
    suffix = path.suffix
    if suffix not in (".h5", ".keras"):
        raise InputError(f"name the file *.h5 or *.keras, not {path.name!r}")
    if isinstance(model, str):
        data = decode_base64(model)
        found = _recognize(data)
        if found != suffix:
            raise InputError(f"this model is a {found} file: end the name in {found}, not {suffix}")
    else:
        data = model_to_bytes(
            model,
            format="h5" if suffix == ".h5" else "keras",
            include_optimizer=include_optimizer,
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_bytes(data)
    partial.replace(path)
    return path


def load_model(path: str | Path, **options: Any) -> Any:
    """Load an ``.h5`` or ``.keras`` file; options and errors as in `model_from_bytes`."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"there is no model file at {str(path)!r}")
    return model_from_bytes(path.read_bytes(), **options)


def sha256_of(model: str | bytes) -> str:
    """Hexadecimal SHA-256 of a model's bytes, given as such or as base64 text."""
    data = decode_base64(model) if isinstance(model, str) else model
    return hashlib.sha256(data).hexdigest()


def decode_base64(text: str) -> bytes:
    """Decode base64 strictly; white space (line breaks of R's encoders) is allowed."""
    if not isinstance(text, str):
        raise InputError(f"expected base64 text, not {type(text).__name__}")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise SerializationError(
            f"this is not base64 text ({error}): it was truncated or altered on its way"
        ) from error


def _check_keras_model(model: Any) -> None:
    import_tensorflow()
    import keras

    if isinstance(model, keras.Model):
        return
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if kind.startswith("tf_keras"):
        raise InputError(f"this is a Keras 2 model ({kind}); tfdist trains Keras 3 models")
    raise InputError(f"expected a Keras model, not {kind}")


def _check_digest(data: bytes, expected: str | None) -> None:
    if expected is None:
        return
    found = hashlib.sha256(data).hexdigest()
    if found != expected.lower():
        raise SerializationError(
            f"the model's SHA-256 is {found}, expected {expected}: it was altered on its way"
        )


def _recognize(data: bytes) -> str:
    if data.startswith(_HDF5_MAGIC):
        return ".h5"
    if data.startswith(_ZIP_MAGIC):
        return ".keras"
    raise SerializationError(
        f"these {len(data)} bytes are neither an HDF5 nor a .keras file: truncated, or not a model"
    )


def _refuse_foreign(path: Path) -> None:
    """Refuse damaged files and those of Keras 2 before Keras reads them."""
    try:
        if path.suffix == ".keras":
            with zipfile.ZipFile(path) as archive:
                damaged = archive.testzip()
                if damaged or "config.json" not in archive.namelist():
                    raise SerializationError(
                        f"the .keras file is damaged at {damaged or 'config.json'!r}"
                    )
                version = str(json.loads(archive.read("metadata.json"))["keras_version"])
        else:
            version = keras_version(path)
    except SerializationError:
        raise
    except Exception as error:  # what zipfile, zlib and h5py make of damage is without end
        raise SerializationError(f"the model file is truncated or corrupted: {error}") from error
    if not version.startswith("3."):
        raise SerializationError(
            f"the file was written by Keras {version or '(unknown)'}, not Keras 3. Load it with "
            "the package that wrote it, and save it again with Keras 3, if you trust it"
        )


@contextmanager
def _quiet_keras() -> Iterator[None]:
    """Keep Keras's advice about HDF5 and fresh optimizers out of the user's console."""
    import warnings

    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            yield
    finally:
        logger.setLevel(level)
