"""Attributes of callbacks, read as plain data for a checkpoint and restored from it."""

from __future__ import annotations

import hashlib
import inspect
import os
from collections.abc import Iterable, Mapping
from typing import Any

import keras

from pybackend.data.state_file import encode_state
from pybackend.errors import InputError, SerializationError

# Attributes that belong to the current training.
_NOT_KEPT = {"params", "_model"}
# Longer values, in bytes, are described by their digest.
_SHOWN_BYTES = 250


def describe_callback(callback: Any) -> dict[str, str]:
    """Return the attributes that a checkpoint stores, as texts that differ if the values do."""
    return _describe_all(_read(callback))


def read_callback(callback: Any, first: Mapping[str, str]) -> dict[str, Any]:
    """Return the attributes of a callback that are plain data, or names of Keras operations.

    Parameters
    ----------
    first
        Result of `describe_callback` before the training began.
    """
    state = _read(callback)
    now = _describe_all(state)
    parameters = inspect.signature(type(callback).__init__).parameters
    settings = {
        name: text for name, text in first.items() if now.get(name) == text or name in parameters
    }
    changed = [name for name in now if now[name] != first.get(name)]
    log = measure_log(callback)
    return {**state, "settings": settings, "changed": changed, "log": log}


def restore_callback(callback: Any, state: Mapping[str, Any], first: Mapping[str, str]) -> None:
    """Restore the attributes that `read_callback` read; paths remain those of this training.

    Parameters
    ----------
    first
        Result of `describe_callback` before this training began.

    Raises
    ------
    InputError
        A setting differs: an attribute that training had not changed, or a parameter of the class.
    """
    here = {name for name, text in state["settings"].items() if first.get(name) != text}
    for name in sorted(here):
        there, own = state["settings"][name], first.get(name, "missing")
        if not (_is_path(there) and _is_path(own)):
            raise InputError(
                f"callback {type(callback).__name__}: its {name} is {there} in the checkpoint, but "
                f"{own} now. Pass the old value, set it in `on_train_begin` if it is not a "
                "setting, or name another folder in `checkpoint`"
            )
    unchanged = (here - set(state["changed"])) | _find_derived_paths(callback)
    operations = {name: getattr(keras.ops, one) for name, one in state["operations"].items()}
    for name, value in {**state["values"], **operations}.items():
        if name not in unchanged and _may_have(callback, name):
            setattr(callback, name, value)
    if "filename" not in here:
        cut_log(callback, state["log"])


def find_lost(callbacks: Iterable[Any]) -> list[str]:
    """Return attributes of custom callbacks that are not plain data, as ``Class.name``."""
    return [
        f"{type(callback).__name__}.{name}"
        for callback in callbacks
        if type(callback).__module__.partition(".")[0] != "keras"
        for name, value in vars(callback).items()
        if name not in _NOT_KEPT
        and not callable(value)
        and not isinstance(value, os.PathLike)
        and not _is_plain(value)
    ]


def _read(callback: Any) -> dict[str, dict[str, Any]]:
    """Return plain attributes, and the names of operations.

    Keras's monitoring callbacks choose an operation (``keras.ops.less``) once, and change their
    ``min_delta`` with it: they must be restored together.
    """
    values, operations = {}, {}
    # Keras reads from the file whether it has a header.
    is_log = isinstance(callback, keras.callbacks.CSVLogger)
    not_kept = {*_NOT_KEPT, "append_header"} if is_log else _NOT_KEPT
    for name, value in vars(callback).items():
        if name in not_kept:
            continue
        if name_of_operation := _find_operation(value):
            operations[name] = name_of_operation
        elif _is_plain(value):
            values[name] = value
    return {"values": values, "operations": operations}


def _describe_all(state: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    shown = {name: _describe(value) for name, value in state["values"].items()}
    return {**shown, **state["operations"]}


def _describe(value: Any) -> str:
    value = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    encoded = encode_state(value)
    if len(encoded) <= _SHOWN_BYTES or isinstance(value, str):
        return repr(value)
    return f"a {type(value).__name__} of digest {hashlib.sha256(encoded).hexdigest()[:12]}"


def _find_derived_paths(callback: Any) -> set[str]:
    """Return the folders of a `TensorBoard`: it derives them from `log_dir` when it begins."""
    if not isinstance(callback, keras.callbacks.TensorBoard):
        return set()
    return {n for n, v in vars(callback).items() if isinstance(v, str) and _is_path(repr(v))}


def _is_path(shown: str) -> bool:
    """Return whether a described attribute is text that may be a path or a file name."""
    return shown[0] in "\"'" and any(mark in shown for mark in (".", "/", os.sep))


def _may_have(callback: Any, name: str) -> bool:
    """Return whether `read_callback` may have found an attribute; never a method or property."""
    if name in vars(callback):
        return name not in _NOT_KEPT
    # Training may have added it, perhaps over a default of the class.
    default = getattr(type(callback), name, None)
    return name not in _NOT_KEPT and (_is_plain(default) or _find_operation(default) is not None)


def _find_operation(value: Any) -> str | None:
    name = getattr(value, "__name__", None)
    is_known = isinstance(name, str) and callable(value) and hasattr(keras.ops, name)
    return name if is_known and getattr(keras.ops, str(name)) is value else None


def _is_plain(value: Any) -> bool:
    try:
        encode_state(value)
    except (SerializationError, RecursionError):
        return False
    return True


def continue_log(callback: Any) -> None:
    """Make a `CSVLogger` of a resumed training append to its file."""
    if isinstance(callback, keras.callbacks.CSVLogger):
        callback.append = True


def measure_log(callback: Any) -> int | None:
    """Return the size of a `CSVLogger`'s file in bytes, if it is on this machine."""
    if not isinstance(callback, keras.callbacks.CSVLogger):
        return None
    return os.path.getsize(callback.filename) if os.path.isfile(callback.filename) else None


def cut_log(callback: Any, size: int | None) -> None:
    """Remove the rows that were written after the checkpoint; their epochs are repeated."""
    now = measure_log(callback)
    if size is not None and now is not None and now > size:
        # Keras opened the file to append: it continues at the new end.
        os.truncate(callback.filename, size)
        if not size:
            callback.append_header = True
