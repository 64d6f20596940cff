"""One training with a number of workers: by your function, or by a script."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from pybackend.api.result import TrainResult
from pybackend.api.scaled import (
    ScaledTraining,
    ScaleOrder,
    count_rows,
    read_scale,
    share_batch,
    write_order,
)
from pybackend.errors import ClusterError, InputError

_STDERR = 2  # a file descriptor: a notebook's sys.stderr has none
_BATCH_SIZE = 32  # the default of `barrier_train`


class Trains(Protocol):
    """Callable that trains once."""

    def __call__(self, workers: int, is_shared: bool) -> ScaledTraining:
        """Train with a number of workers, which share one batch or have one batch each."""


@dataclass(frozen=True)
class FunctionRun:
    """Run of a function ``train(workers=..., batch_size=...)`` that returns a `TrainResult`."""

    train: Callable[..., Any]
    batch_size: int

    def __call__(self, workers: int, is_shared: bool) -> ScaledTraining:
        """Call the function once."""
        own = share_batch(self.batch_size, workers) if is_shared else self.batch_size
        result = self.train(workers=workers, batch_size=own)
        if not isinstance(result, TrainResult):
            raise InputError(
                f"`train` must return the result of barrier_train(), not {type(result).__name__}"
            )
        if len(result.workers) != workers:
            raise InputError(
                f"`train` was called with workers={workers}, but {len(result.workers)} workers "
                "trained: pass its argument `workers` on to barrier_train()"
            )
        return ScaledTraining(count_rows(result, own), self.batch_size, result.workers)


@dataclass(frozen=True)
class ScaledScript:
    """Run of a script in its own process, whose output goes to standard error."""

    command: tuple[str, ...]
    batch_size: int | None
    steps: int | None

    def __call__(self, workers: int, is_shared: bool) -> ScaledTraining:
        """Run the script once."""
        with (
            _ending_with_exit(),
            tempfile.TemporaryDirectory(prefix="tfdist-scale-") as folder,
        ):
            order = ScaleOrder(workers, is_shared, self.batch_size, self.steps, folder)
            ended = subprocess.run(
                self.command, env=write_order(order), stdout=_STDERR, check=False
            )
            found = read_scale(folder)
        shown = " ".join(self.command[1:])
        if ended.returncode:
            raise ClusterError(
                f"{shown} exited with status {ended.returncode} in the training with {workers} "
                f"worker{'s' if workers > 1 else ''}: see its output above"
            )
        if found is None:
            raise InputError(f"{shown} did not call barrier_train(), or exited before it ended")
        return found


@contextmanager
def _ending_with_exit() -> Iterator[None]:
    """Let SIGTERM raise `SystemExit`, so that the script does not outlive this process."""
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def make_run(
    train: Any, arguments: Sequence[str], batch_size: int | None, steps: int | None
) -> Trains:
    """Return the run of a function, or of the path of a script (Python or R).

    Raises
    ------
    InputError
        ``train`` is neither, or cannot be called or read.
    """
    if isinstance(train, (str, os.PathLike)):
        return ScaledScript(_read_command(os.fspath(train), arguments), batch_size, steps)
    if not callable(train) or hasattr(train, "fit"):  # a model is callable, too
        raise InputError(
            "`train` must be a function that calls barrier_train(), or the path of a script, not "
            f"{type(train).__name__}"
        )
    if arguments:
        raise InputError("`arguments` are for a script: a function takes none")
    if steps is not None:
        raise InputError("`steps` is for a script: a function sets its own number of steps")
    try:
        inspect.signature(train).bind(workers=1, batch_size=1)
    except TypeError as error:
        raise InputError(
            f"`train` is called as train(workers=..., batch_size=...), which fails: {error}"
        ) from None
    return FunctionRun(train, batch_size or _BATCH_SIZE)


def _read_command(path: str, arguments: Sequence[str]) -> tuple[str, ...]:
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise InputError(f"the script {path} cannot be read: {error.strerror}") from error
    if path.lower().endswith(".r"):
        rscript = shutil.which("Rscript")
        if rscript is None:
            raise InputError(f"{path} needs R, but Rscript is not on the PATH")
        return (rscript, path, *arguments)
    if not path.endswith(".py"):
        raise InputError(f"the script must be a .py or a .R file, not {path}")
    try:
        compile(content, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise InputError(f"the script {path} is not Python: {error}") from error
    return (sys.executable, path, *arguments)
