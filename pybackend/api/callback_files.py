"""Files that callbacks of Keras's write: worker 0 writes them, wherever it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from pybackend.api.observer import list_callbacks
from pybackend.job.messages import Note
from pybackend.launchers import Launcher

# The attribute that holds the path, by what the classes are called.
_PATHS = {"ModelCheckpoint": "filepath", "CSVLogger": "filename", "TensorBoard": "log_dir"}


def note_files(callbacks: Any, launcher: Launcher) -> Note | None:
    """Say that files with relative paths will not lie in this session's folder; None: they will.

    Parameters
    ----------
    callbacks
        As `barrier_train` takes them.
    """
    found = [file for one in list_callbacks(callbacks) for file in _relative_paths(one)]
    if launcher.is_here or not found:
        return None
    return Note(
        f"{', '.join(found)}: worker 0 writes into a folder of its own, on its host. Name a full "
        "path on storage that this session sees, too; or use what comes back: `history`, "
        "`checkpoint`, and early stopping with `restore_best_weights`"
    )


def _relative_paths(callback: Any) -> Iterator[str]:
    for kind in (kind.__name__ for kind in type(callback).__mro__ if kind.__name__ in _PATHS):
        path = getattr(callback, _PATHS[kind], None)  # None: a class of the user's, of that name
        if isinstance(path, (str, os.PathLike)) and not _is_found_anywhere(os.fspath(path)):
            yield f"{kind}({os.fspath(path)!r})"


def _is_found_anywhere(path: str) -> bool:
    return os.path.isabs(path) or "://" in path
