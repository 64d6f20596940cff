"""Where what TensorBoard shows of a training is written."""

from __future__ import annotations

import os
import re
import sys
import time
from importlib.util import find_spec
from typing import Any

from pybackend.errors import InputError

FOLDER = "logs"
"""Of this directory, for trainings that name none; `tfdist tensorboard` shows all in it."""


def check_tensorboard(value: Any) -> str | None:
    """Check the argument ``tensorboard``; an absolute path, a URI, or None for nothing.

    Raises
    ------
    InputError
        It is something else, or a file.
    """
    if value is None or value is False:
        return None
    if value is True:
        return _choose_folder()
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise InputError(f"`tensorboard` must be True, a folder or a URI, not {value!r}")
    folder = re.sub(r"^file:(//)?(?=/)", "", os.fspath(value))
    if is_uri(folder):
        return folder
    if os.path.isfile(folder):
        raise InputError(f"`tensorboard`: {folder!r} is a file: name a folder")
    return os.path.abspath(folder)


def check_installed(there: str = "") -> None:
    """Check that there is a TensorBoard, without which TensorFlow writes nothing for it.

    Parameters
    ----------
    there
        Where this process runs, e.g. `` on ann``, for the message.

    Raises
    ------
    InputError
        There is none.
    """
    if find_spec("tensorboard") is None:
        raise InputError(
            f"TensorBoard is not installed{there} for {sys.executable}: "
            "pip install 'tfdist[tensorboard]'"
        )


def is_uri(folder: str) -> bool:
    """Return whether rank 0 itself writes there; else the driver does."""
    return "://" in folder


def _choose_folder() -> str:
    """A new one, named by the time: two trainings of one second have two."""
    first = os.path.abspath(os.path.join(FOLDER, time.strftime("%Y%m%d-%H%M%S")))
    folder, number = first, 1
    while os.path.exists(folder):
        number += 1
        folder = f"{first}-{number}"
    return folder
