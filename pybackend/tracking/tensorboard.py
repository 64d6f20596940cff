"""Event files for TensorBoard, and TensorBoard itself.

TensorBoard runs on this machine, in a separate process that ends no later than this one.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections import deque
from typing import Any

from pybackend.core.api.calls import explain_arguments
from pybackend.core.api.observer import EventFolder
from pybackend.core.api.train_result import TrainResult
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.arguments import LOGS, check_log_folder, check_tensorboard, is_uri
from pybackend.core.job.call_options import PathOrUri
from pybackend.core.words import call_of, setting, show, term

_SERVES = re.compile(r"http://\S+?:\d+/")
_START_SECONDS = 120.0
_END_SECONDS = 5.0
_SHOWN_LINES = 20
_OPTIONS = ("--reload_multifile=true", "--reload_interval=5")
# It ends when its input is closed, so it never outlives the process that started it.
_PROGRAM = """
import sys
del sys.path[0]  # the working directory
import os, signal, threading

def follow():
    sys.stdin.buffer.read()
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=follow, daemon=True).start()
sys.argv[0] = "tensorboard"
from tensorboard.main import run_main
run_main()
"""


@explain_arguments
def track_tensorboard(folder: PathOrUri | None = None) -> EventFolder:
    """Write a training run's event files for TensorBoard. Pass the result in ``callbacks``.

    They contain the metrics of each epoch, the metrics of rank 0's rows every 50 steps, and the
    graph. On any cluster, rank 0 writes them with Keras's callback and sends them here at the end
    of each epoch and every 10 seconds. See ``tfdist tensorboard``, `view_tensorboard` and
    `TrainResult.tensorboard`. For a profile, pass a ``keras.callbacks.TensorBoard`` instead.

    Parameters
    ----------
    folder
        Folder on this machine. A URI that TensorFlow can write to: rank 0 writes there directly.
        None (default): a new folder in ``logs`` for each training run. Each trial of `train_many`
        has a folder in it: ``trial-1``, ...

    Returns
    -------
    EventFolder
        An object for ``callbacks``.

    Raises
    ------
    InputError
        ``folder`` is neither a folder nor a URI.

    Examples
    --------
    >>> callbacks = [track_tensorboard("logs/run1")]  # doctest: +SKIP
    """
    return EventFolder(check_log_folder(folder))


class TensorBoardView:
    """A TensorBoard that runs until `close`, or until this process ends.

    Attributes
    ----------
    url
        URL for a browser on this machine.
    folder
        Folder that it shows.
    """

    def __init__(self, folder: str, host: str = "127.0.0.1", port: str = "0") -> None:
        self.folder = folder
        options = [f"--logdir={folder}", f"--host={host}", f"--port={port}", *_OPTIONS]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *options],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C in an R session must not end it
        )
        try:
            self.url = self._read_url()
        except BaseException:
            self.close()
            raise

    def wait(self) -> None:
        self._process.wait()

    def close(self) -> None:
        """Stop TensorBoard. No process remains."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> TensorBoardView:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<TensorBoard of {self.folder} at {self.url}>"

    def _read_url(self) -> str:
        output: Any = self._process.stdout
        limit = threading.Timer(_START_SECONDS, self._process.kill)
        limit.start()
        printed: deque[str] = deque(maxlen=_SHOWN_LINES)
        try:
            for line in output:
                printed.append(line)
                if found := _SERVES.search(line):
                    threading.Thread(target=_drain, args=(output,), daemon=True).start()
                    return found[0]
        finally:
            limit.cancel()
        output.close()
        raise ClusterError(f"TensorBoard did not start:\n{''.join(printed).rstrip()}")


def view_tensorboard(what: Any = None) -> TensorBoardView:
    """Start TensorBoard on a free local port, reachable only from this machine.

    Parameters
    ----------
    what
        A `TrainResult`, or a folder. None (default): ``logs``, where training runs with
        ``tensorboard=True`` write their files.

    Returns
    -------
    TensorBoardView
        Open its ``url`` in a browser. It runs until ``close()`` is called or this process ends.

    Raises
    ------
    InputError
        TensorBoard is not installed, or there is nothing to show.
    ClusterError
        TensorBoard does not start.
    """
    folder = _find_folder(what)
    check_tensorboard()
    return TensorBoardView(folder)


def _find_folder(what: Any) -> str:
    if isinstance(what, TrainResult):
        if what.tensorboard is None:
            raise InputError(f"this training run wrote no event files: train with `{_example()}`")
        what = what.tensorboard
    folder = LOGS if what is None else what
    if not isinstance(folder, (str, os.PathLike)):
        raise InputError(f"TensorBoard shows a {term('TrainResult')} or a folder, not {show(what)}")
    folder = os.fspath(folder)
    if not is_uri(folder) and not os.path.isdir(folder):
        raise InputError(
            f"there is no folder {show(folder)}: train with `{_example()}`, or pass the folder "
            "of `track_tensorboard` in training"
        )
    return folder


def _example() -> str:
    return setting(callbacks=[call_of("track_tensorboard")])


def _drain(lines: Any) -> None:
    """Read and discard the output: a full pipe would block TensorBoard."""
    with lines:
        for _ in lines:
            pass
