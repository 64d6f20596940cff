"""Check that a figure can be drawn, and write it to a file."""

from __future__ import annotations

import os
from importlib.util import find_spec
from typing import Any

from pybackend.core.errors import InputError

_KINDS = (".png", ".pdf", ".svg")


def save_figure(figure: Any, path: str | os.PathLike[str]) -> None:
    """Write a matplotlib figure; create its folder if needed.

    Raises
    ------
    InputError
        The file cannot be written.
    """
    try:
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise InputError(f"{os.fspath(path)} cannot be written: {error}") from error


def check_figure(path: str | os.PathLike[str] | None) -> None:
    """Check that a figure can be drawn, and written to this path.

    Parameters
    ----------
    path
        None: the figure is only shown.

    Raises
    ------
    InputError
        matplotlib is missing, or the type of the file is not supported.
    """
    if find_spec("matplotlib") is None:
        raise InputError("plots need matplotlib: pip install 'tfdist[plots]'")
    if path is not None and os.path.splitext(path)[1].lower() not in _KINDS:
        raise InputError(f"name the figure's file *.png, *.pdf or *.svg, not {os.fspath(path)!r}")
