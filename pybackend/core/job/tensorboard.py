"""Folder or URI of a training run's event files for TensorBoard."""

from __future__ import annotations

import os
import re
import sys
import time
from importlib.util import find_spec
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.words import install, show

FOLDER = "logs"
"""Default folder in the working directory; `tfdist tensorboard` shows all training runs in it."""


def check_folder(value: Any) -> str | None:
    """Check the argument ``folder`` of `track_tensorboard`; return an absolute path, a URI or None.

    Raises
    ------
    InputError
        It has a different type, or is a file.
    """
    if value is None:
        return None
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise InputError(f"`folder` must be a folder or a URI, not {show(value)}")
    folder = re.sub(r"^file:(//)?(?=/)", "", os.fspath(value))
    if is_uri(folder):
        return folder
    if os.path.isfile(folder):
        raise InputError(f"`folder`: {show(folder)} is a file: specify a folder")
    return os.path.abspath(folder)


def check_installed(there: str = "") -> None:
    """Check that TensorBoard is installed: without it TensorFlow writes no event files.

    Parameters
    ----------
    there
        Host of this process for the message, e.g. `` on ann``.

    Raises
    ------
    InputError
        TensorBoard is not installed.
    """
    if find_spec("tensorboard") is None:
        raise InputError(
            f"TensorBoard is not installed{there} for {sys.executable}: {install('tensorboard')}"
        )


def is_uri(folder: str) -> bool:
    """Return whether this is a URI, which rank 0 writes to; the driver writes to folders."""
    return "://" in folder


def choose_folder() -> str:
    """Return a new folder named by the time; a number is appended if it already exists."""
    first = os.path.abspath(os.path.join(FOLDER, time.strftime("%Y%m%d-%H%M%S")))
    folder, number = first, 1
    while os.path.exists(folder):
        number += 1
        folder = f"{first}-{number}"
    return folder
