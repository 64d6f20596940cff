"""Files that callbacks of Keras's write: worker 0 writes them, wherever it runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

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
    listed = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
    found = [] if launcher.is_here else [file for one in listed for file in _relative_paths(one)]
    if not found:
        return None
    return Note(
        f"{', '.join(found)}: worker 0 writes into a folder of its own, on its host. Name a full "
        "path on storage that this session sees, too; or use what comes back: `history`, "
        "`checkpoint`, and early stopping with `restore_best_weights`"
    )


def _relative_paths(callback: Any) -> Iterator[str]:
    for kind in type(callback).__mro__:
        path = getattr(callback, _PATHS.get(kind.__name__, ""), None)
        if isinstance(path, (str, os.PathLike)) and "://" not in os.fspath(path):
            if not os.path.isabs(path):
                yield f"{kind.__name__}({os.fspath(path)!r})"
            return
