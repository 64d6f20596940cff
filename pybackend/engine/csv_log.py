"""The file of a `CSVLogger` in a training that resumes: it goes on where the checkpoint was."""

from __future__ import annotations

import os
from typing import Any

import keras


def continue_log(callback: Any) -> None:
    """Before a resumed training: have a `CSVLogger` keep the rows that its file has."""
    if isinstance(callback, keras.callbacks.CSVLogger):
        callback.append = True


def measure_log(callback: Any) -> int | None:
    """The bytes in a `CSVLogger`'s file, if it is one of this machine."""
    if not isinstance(callback, keras.callbacks.CSVLogger):
        return None
    return os.path.getsize(callback.filename) if os.path.isfile(callback.filename) else None


def cut_log(callback: Any, size: int | None) -> None:
    """Remove the rows that were written after the checkpoint, whose epochs come again."""
    now = measure_log(callback)
    if size is not None and now is not None and now > size:
        # Keras has opened the file to append: what it writes goes to the new end.
        os.truncate(callback.filename, size)
        if not size:
            callback.append_header = True
