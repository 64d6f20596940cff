"""Conversion of Keras models to and from bytes, base64 text and files.

Loading is safe by default: a file that carries Python code (e.g. a ``Lambda`` layer) is rejected
unless ``safe_mode=False``. Files written by Keras 2 are always rejected, because only the legacy
package could read them, and it executes such code.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import logging
import tempfile
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, overload

from pybackend.core.data.files import check_writable, write_whole
from pybackend.core.errors import InputError, SerializationError, UnverifiedFileWarning
from pybackend.core.model import compile_settings
from pybackend.core.model.file_checks import Format, check_digest, check_file, recognize_format
from pybackend.core.quiet import import_tensorflow
from pybackend.core.words import setting, show

_MARK = b"\ntfdist sha256 "
_LENGTH = len(_MARK) + 64


def model_to_bytes(model: Any, *, format: Format = "h5", include_optimizer: bool = False) -> bytes:
    """Encode a Keras model with its weights and compile settings, as `save_model` does."""
    if format not in ("h5", "keras"):
        raise InputError(f"`format` must be {show('h5')} or {show('keras')}, not {show(format)}")
    _check_keras_model(model)
    if format == "h5" and not type(model).__module__.startswith("keras."):
        # Keras writes it without an error, and then cannot read it.
        raise SerializationError(
            f"HDF5 can only store functional and Sequential models, but {show(model.name)} is of "
            f"the custom class {type(model).__qualname__}: use {setting(format='keras')}"
        )
    with model_file(format) as path:
        _write_file(path, model, include_optimizer)
        return append_digest(path.read_bytes())


def _write_file(path: Path, model: Any, include_optimizer: bool) -> None:
    import keras

    try:
        # For HDF5 the compile settings are written below: Keras, writing them, removes the
        # optimizer from the model's own settings, so that the next `.keras` file has none.
        keras.saving.save_model(model, path, include_optimizer=False)
    except Exception as error:
        raise SerializationError(
            f"Keras cannot write the model {show(model.name)} as {path.suffix}: {error}"
        ) from error
    if path.suffix == ".keras":
        if not include_optimizer:
            compile_settings.drop_optimizer_state(path)
        compile_settings.complete_archive(path, model)
    elif model.compiled:
        compile_settings.write_compile_settings(path, model)
        if include_optimizer and model.optimizer is not None and model.optimizer.built:
            compile_settings.write_optimizer_state(path, model.optimizer)


def model_from_bytes(
    data: bytes,
    *,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
    sha256: str | None = None,
    compile: bool = True,
) -> Any:
    """Decode the bytes of a model file, as `load_model` does; the content shows the format."""
    if not isinstance(data, (bytes, bytearray, memoryview)):
        raise InputError(f"expected the bytes of a model file, not {type(data).__name__}")
    data = bytes(data)
    if sha256 is None:
        check_carried_digest(data)
    else:
        check_digest(data, sha256)
    is_intact = sha256 is not None
    return _decode(data, is_intact, custom_objects, safe_mode=safe_mode, compile=compile)


def read_own_model(data: bytes, *, custom_objects: Any = None, **options: bool) -> Any:
    """Decode bytes that the job itself wrote, and that are therefore not hostile.

    The options are ``safe_mode`` and ``compile``, both True by default.
    """
    check_carried_digest(data)
    return _decode(data, True, custom_objects, **options)


@contextmanager
def model_file(kind: str, content: bytes = b"") -> Iterator[Path]:
    """Yield a temporary file, as Keras only uses files, and finds the format from the name."""
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder, silence_keras():
        path = Path(folder) / f"model.{kind}"
        path.write_bytes(content)
        yield path


def _decode(data: bytes, is_intact: bool, custom_objects: Any, **options: bool) -> Any:
    format = recognize_format(data)
    import_tensorflow()
    with model_file(format, data) as path:
        check_file(path, is_intact=is_intact)
        try:
            return _read_file(path, custom_objects, **options)
        except SerializationError:
            raise
        except Exception as error:
            if _is_of_device(error):
                raise
            # Keras shows the whole configuration around its reason; the cause still has it.
            reason = str(error).rpartition("Exception encountered: ")[2]
            reason = reason.partition("Full object config")[0].strip(" .\n")
            raise SerializationError(
                f"Keras cannot load this model ({len(data)} bytes, .{format}): {reason}. Name "
                "custom layers, losses and metrics in `custom_objects`. "
                f"`{setting(safe_mode=False)}` lets the file run code that it contains: use it "
                "only for a file you trust."
            ) from error


def _is_of_device(error: Exception) -> bool:
    """Return whether the cause is a GPU that failed or ran out of memory, not the file."""
    from tensorflow import errors

    return isinstance(error, errors.InternalError | errors.ResourceExhaustedError)


def _read_file(
    path: Path, custom_objects: Any, safe_mode: bool = True, compile: bool = True
) -> Any:
    import_tensorflow()
    import keras

    written = None
    if path.suffix == ".h5":
        compile_settings.remove_keras_optimizer_state(path)
        written = compile_settings.read_compile_settings(path) if compile else None
    model = keras.saving.load_model(
        path,
        custom_objects=dict(custom_objects or {}),
        compile=compile and written is None,
        safe_mode=safe_mode,
    )
    if written is not None:
        compile_settings.compile_as_written(model, written, custom_objects, safe_mode)
    if path.suffix == ".h5" and model.compiled:
        compile_settings.restore_optimizer_state(path, model)
    return model


def model_to_base64(model: Any, *, format: Format = "h5", include_optimizer: bool = False) -> str:
    """Encode a Keras model as base64 text; parameters and errors as in `save_model`."""
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
    """Decode base64 text of a model file; parameters and errors as in `load_model`."""
    return model_from_bytes(
        decode_base64(text),
        custom_objects=custom_objects,
        safe_mode=safe_mode,
        sha256=sha256,
        compile=compile,
    )


@overload
def save_model(
    model: Any, path: str | Path, *, format: Format | None = None, include_optimizer: bool = False
) -> Path: ...
@overload
def save_model(
    model: Any, path: None, *, format: Format | None = None, include_optimizer: bool = False
) -> bytes: ...
def save_model(
    model: Any,
    path: str | Path | None,
    *,
    format: Format | None = None,
    include_optimizer: bool = False,
) -> Path | bytes:
    """Write a Keras model, or its base64 text, to an ``.h5`` or ``.keras`` file, with a digest.

    The file is either complete or absent.

    Parameters
    ----------
    model
        A Keras 3 model, or the result of `model_to_base64`.
    path
        File to write, ``*.h5`` or ``*.keras``. None: the content is returned as bytes.
    format
        Format of bytes: ``"h5"`` (default: functional and Sequential models) or ``"keras"`` (any
        serializable model). Files have the format that their name ends in.
    include_optimizer
        True includes the optimizer's state (momenta, step count). The optimizer's class and
        settings are always included.

    Returns
    -------
    pathlib.Path or bytes
        The path, or the content if ``path`` is None.

    Raises
    ------
    InputError
        ``model`` is not a Keras model, or ``path`` or ``format`` is invalid.
    SerializationError
        Keras cannot encode the model.
    """
    if path is None:
        if isinstance(model, str):
            return decode_base64(model)
        return model_to_bytes(model, format=format or "h5", include_optimizer=include_optimizer)
    path = Path(path)
    suffix = path.suffix
    if suffix not in (".h5", ".keras"):
        raise InputError(f"name the file *.h5 or *.keras, not {show(path.name)}")
    if format not in (None, suffix[1:]):
        raise InputError(f"{setting(format=format)}, but {show(path.name)} ends in {suffix}")
    check_writable(str(path), "path")
    if isinstance(model, str):
        data = decode_base64(model)
        if (found := f".{recognize_format(data)}") != suffix:
            raise InputError(f"this model is a {found} file: end the name in {found}, not {suffix}")
    else:
        kind: Format = "h5" if suffix == ".h5" else "keras"
        data = model_to_bytes(model, format=kind, include_optimizer=include_optimizer)
    write_whole(str(path), data)
    return path


def load_model(
    path: str | Path | bytes,
    *,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
    sha256: str | None = None,
    compile: bool = True,
) -> Any:
    """Load an ``.h5`` or ``.keras`` file.

    The first ``.h5`` file without a digest, such as one that Keras itself wrote, causes an
    `UnverifiedFileWarning`, because damage to its weights cannot be detected.

    Parameters
    ----------
    path
        The file, or its content as bytes.
    custom_objects
        Maps names to classes or functions, for custom layers, losses and metrics.
    safe_mode
        False allows a model to run Python code that it contains. Use it only for files that you
        trust.
    sha256
        Hexadecimal digest that the file must have. None (default): the digest that `save_model`
        appended to the content, if there is one.
    compile
        True (default) compiles the model with its saved settings.

    Returns
    -------
    keras.Model

    Raises
    ------
    InputError
        There is no such file.
    SerializationError
        The file is truncated, corrupted, written by Keras 2, or needs ``custom_objects``; or it
        refers to other files or claims more content than it holds, which Keras files never do.
    """
    if isinstance(path, (bytes, bytearray, memoryview)):
        data = bytes(path)
    else:
        path = Path(path)
        if not path.is_file():
            raise InputError(f"there is no model file at {show(str(path))}")
        data = path.read_bytes()
        # The parts of an archive have checksums of their own.
        is_verified = sha256 is not None or recognize_format(data) == "keras"
        if not is_verified and _find_mark(data) < 0:
            _warn_of_unverified(path.name)
    return model_from_bytes(
        data, custom_objects=custom_objects, safe_mode=safe_mode, sha256=sha256, compile=compile
    )


_has_warned = threading.Event()
_silence = threading.RLock()


def _warn_of_unverified(name: str) -> None:
    if not _has_warned.is_set():
        _has_warned.set()
        warnings.warn(
            f"{name} has no digest, so damage to its weights cannot be detected: write it with "
            "save_model(), which adds one, or pass `sha256`",
            UnverifiedFileWarning,
            stacklevel=3,
        )


def sha256_of(model: str | bytes) -> str:
    return hashlib.sha256(decode_base64(model) if isinstance(model, str) else model).hexdigest()


def _check_keras_model(model: Any) -> None:
    import_tensorflow()
    import keras

    if isinstance(model, keras.Model):
        return
    kind = f"{type(model).__module__}.{type(model).__qualname__}"
    if kind.startswith("tf_keras"):
        raise InputError(f"this is a Keras 2 model ({kind}); tfdist trains Keras 3 models")
    raise InputError(f"expected a Keras model, not {kind}")


@contextmanager
def silence_keras() -> Iterator[None]:
    """Suppress Keras's advice about HDF5 and fresh optimizers."""
    # In one thread at a time: these settings are global.
    logger = logging.getLogger("absl")
    with _silence:
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", UserWarning)
                yield
        finally:
            logger.setLevel(level)


def append_digest(data: bytes) -> bytes:
    """Return a model file with its digest; an archive must not have a comment yet."""
    if recognize_format(data) == "keras":
        # The last field of an archive is the length of its comment.
        data = data[:-2] + _LENGTH.to_bytes(2, "little")
    return data + _MARK + _digest(data)


def check_carried_digest(data: bytes) -> None:
    """Reject a model file whose digest does not match its content."""
    begin = _find_mark(data)
    if begin >= 0 and data[begin:] != _MARK + _digest(data[:begin]):
        raise SerializationError(
            "the model file was altered or damaged: its content does not match the SHA-256 stored "
            "in it. Copy or save it again"
        )


def _find_mark(data: bytes) -> int:
    """Return where a file's digest, or the remains of one, begins; -1 without a digest."""
    return data.rfind(_MARK, max(0, len(data) - _LENGTH))


def _digest(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode()


def decode_base64(text: str) -> bytes:
    """Decode base64 strictly; whitespace (line breaks from R's encoders) is allowed."""
    if not isinstance(text, str):
        raise InputError(f"expected base64 text, not {type(text).__name__}")
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise SerializationError(
            f"this is not base64 text ({error}): it was truncated or altered in transit"
        ) from error
