"""Files that Keras callbacks write: on the host of worker 0."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from pybackend.api.observer import list_callbacks
from pybackend.job.messages import Note
from pybackend.launchers import Launcher

# The attribute that holds the path, by the name of the class.
_PATHS = {"ModelCheckpoint": "filepath", "CSVLogger": "filename", "TensorBoard": "log_dir"}


def note_files(callbacks: Any, launcher: Launcher) -> Note | None:
    """Return a note if files with relative paths will not be in this session's folder, else None.

    Parameters
    ----------
    callbacks
        As `barrier_train` takes them.
    """
    found = [file for one in list_callbacks(callbacks) for file in _relative_paths(one)]
    if launcher.is_here or not found:
        return None
    return Note(
        f"{', '.join(found)}: worker 0 writes into its own folder on its host. Use an absolute "
        "path on storage that this session can read; or use `history` of the result, `checkpoint`, "
        "or early stopping with `restore_best_weights`"
    )


def _relative_paths(callback: Any) -> Iterator[str]:
    for kind in (kind.__name__ for kind in type(callback).__mro__ if kind.__name__ in _PATHS):
        path = getattr(callback, _PATHS[kind], None)  # None: another class of that name
        if isinstance(path, (str, os.PathLike)) and not _is_found_anywhere(os.fspath(path)):
            yield f"{kind}({os.fspath(path)!r})"


def _is_found_anywhere(path: str) -> bool:
    return os.path.isabs(path) or "://" in path
