"""Files that rank 0 sends to the session: files written by callbacks, and TensorBoard's files."""

from __future__ import annotations

import base64
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from pybackend.core.api.observer import list_callbacks
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import is_uri
from pybackend.core.job.messages import Emit, Event, EventBytes, Note
from pybackend.core.launchers import Launcher
from pybackend.core.words import call_of, show

# The attribute that holds the path, by the name of the class.
_PATHS = {"ModelCheckpoint": "filepath", "CSVLogger": "filename", "TensorBoard": "log_dir"}


def note_files(callbacks: Any, launcher: Launcher) -> Note | None:
    """Return a note if files with relative paths will not be in this session's folder, else None.

    Parameters
    ----------
    callbacks
        As in `barrier_train`.
    """
    found = [file for one in list_callbacks(callbacks) for file in _relative_paths(one)]
    if launcher.is_here or not found:
        return None
    return Note(
        f"{', '.join(found)}: worker 0 writes into its own folder on its host. Use an absolute "
        "path on storage that this session can read; or use the result's `history`, `checkpoint`, "
        "or early stopping with `restore_best_weights`"
    )


def _relative_paths(callback: Any) -> Iterator[str]:
    for kind in (kind.__name__ for kind in type(callback).__mro__ if kind.__name__ in _PATHS):
        path = getattr(callback, _PATHS[kind], None)  # None: another class of that name
        if isinstance(path, (str, os.PathLike)) and not _is_found_anywhere(os.fspath(path)):
            yield f"{kind}({show(os.fspath(path))})"


def _is_found_anywhere(path: str) -> bool:
    return os.path.isabs(path) or "://" in path


class EventFiles:
    """Write the event files of a training run to a folder on this machine.

    Parameters
    ----------
    folder
        An absolute path, or a URI to which rank 0 writes directly. None: no files.
    say
        Receives notes: the location of the files when the first arrives, and what is missing at the
        end.

    Raises
    ------
    InputError
        The folder cannot be created.
    """

    def __init__(self, folder: str | None, say: Emit) -> None:
        self._say = say
        self._heard: set[int] = set()
        self._folder = None if folder is None or is_uri(folder) else Path(folder)
        self._is_complete: bool | None = None
        self._error: OSError | ValueError | None = None
        self._made: list[Path] = []
        if self._folder is not None:
            self._made = [p for p in (self._folder, *self._folder.parents) if not p.exists()]
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                call = call_of("track_tensorboard", ...)
                raise InputError(
                    f"`folder` of {call}: {show(folder)} cannot be written: {error}"
                ) from error

    def __call__(self, event: Event) -> None:
        """Write the bytes in an event to the file that it names."""
        self._heard.add(event.rank)
        if not isinstance(event, EventBytes) or self._folder is None:
            return
        if self._is_complete is None:
            self._say(Note(f"run `tfdist tensorboard {self._folder}` to view this training run"))
        self._is_complete = event.is_last
        if event.name and self._error is None:
            try:
                self._write(self._folder, event)
            # A full disk or corrupted bytes must not end the training.
            except (OSError, ValueError) as error:
                self._error = error

    def __enter__(self) -> EventFiles:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # removes only new folders that are empty
            for folder in self._made:
                folder.rmdir()

    def conclude(self) -> None:
        """After the training, send a note on what is missing, and why."""
        if (text := self._describe_loss()) is not None:
            self._say(Note(text))

    def _describe_loss(self) -> str | None:
        if self._folder is None:
            return None
        if self._error is not None:
            return f"TensorBoard's files could not be written to {self._folder}: {self._error}"
        # Among processes that join, only the first receives events of rank 0, and has the files.
        if self._is_complete or (self._heard and 0 not in self._heard):
            return None
        return (
            f"TensorBoard's files in {self._folder} are incomplete: worker 0 had no connection to "
            f"this process while it trained. Pass a URI that it can write to: "
            f"{call_of('track_tensorboard', 's3://bucket/logs')}"
        )

    @staticmethod
    def _write(folder: Path, event: EventBytes) -> None:
        name = PurePosixPath(event.name)
        if name.is_absolute() or ".." in name.parts:
            raise OSError(f"a worker sent a file with the invalid name {show(event.name)}")
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Not appended: in a new generation a worker sends its files from their beginning.
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.seek(event.start)
            file.write(base64.b64decode(event.data, validate=True))
