"""What TensorBoard shows of a training: Keras writes it on rank 0, and it goes to the driver."""

from __future__ import annotations

import base64
import time
from pathlib import Path
from typing import Any

import keras
import tensorflow as tf

from pybackend.errors import InputError
from pybackend.job.job import Job
from pybackend.job.messages import Emit, EventBytes
from pybackend.job.tensorboard import is_uri

# Figures of single steps, those of rank 0's rows, come so often.
_STEPS = 50
# Within a long epoch, files go to the driver so often.
_SECONDS = 10.0
_PART_BYTES = 256 << 10


def make_board(job: Job, folder: Path, emit: Emit) -> list[Any]:
    """The callbacks of rank 0 that write for TensorBoard; none if the job does not ask for it.

    Parameters
    ----------
    folder
        The worker's own, which is removed when it ends.

    Raises
    ------
    InputError
        TensorFlow cannot write to the URI.
    """
    if job.tensorboard is None:
        return []
    if is_uri(job.tensorboard):
        _check_writable(job.tensorboard)
        return [_write_to(job.tensorboard), _Flush()]
    own = folder / "tensorboard"
    return [_write_to(str(own)), _Send(own, emit)]


def _write_to(folder: str) -> Any:
    return keras.callbacks.TensorBoard(folder, update_freq=_STEPS)


def _check_writable(uri: str) -> None:
    try:
        tf.io.gfile.makedirs(uri)
    except tf.errors.OpError as error:
        raise InputError(
            f"`tensorboard`: TensorFlow cannot write to {uri!r} ({error.message}): name a folder "
            "without a scheme, to which this session writes"
        ) from error


class _Flush(keras.callbacks.Callback):
    """Has what was written reach its file, now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._last = time.monotonic()

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if time.monotonic() - self._last > _SECONDS:
            self.flush()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self.flush()

    def flush(self) -> None:
        """`TensorBoard`, which comes first, has made its writer the default one."""
        tf.summary.flush()
        self._last = time.monotonic()


class _Send(_Flush):
    """Sends what has been added to the files."""

    def __init__(self, folder: Path, emit: Emit) -> None:
        super().__init__()
        self._folder = folder
        self._emit = emit
        self._sent: dict[str, int] = {}

    def flush(self) -> None:
        super().flush()
        self._send()

    def on_train_end(self, logs: Any = None) -> None:
        self._send()  # all writers are closed by now
        self._emit(EventBytes("", 0, "", is_last=True))

    def _send(self) -> None:
        for path in sorted(self._folder.rglob("*")):
            if path.is_file():
                self._send_file(path)

    def _send_file(self, path: Path) -> None:
        name = path.relative_to(self._folder).as_posix()
        with path.open("rb") as file:
            file.seek(self._sent.get(name, 0))
            while part := file.read(_PART_BYTES):
                start = self._sent.get(name, 0)
                self._emit(EventBytes(name, start, base64.b64encode(part).decode("ascii")))
                self._sent[name] = start + len(part)
