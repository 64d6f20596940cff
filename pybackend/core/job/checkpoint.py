"""Options for interrupted training runs: checkpoints from which they resume, and restarts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

from pybackend.core.errors import ClusterError, InputError, SerializationError, WorkerFailedError
from pybackend.core.job.arguments import (
    as_number,
    check_flag,
    check_seconds,
    check_whole_number,
    name_arguments,
)
from pybackend.core.words import call_of, one_of, setting, show

_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}
_SPAN = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?(s|min|h)")


@dataclass(frozen=True)
class Checkpoint:
    """Folder and times at which a training run is saved: the part of a `Recovery` in a job.

    Attributes are as in `Recovery`, but there is always a folder.
    """

    uri: str
    every: int | str = "epoch"
    keep: int = 2
    resume: bool = False

    @property
    def steps(self) -> int | None:
        """Number of steps between checkpoints, if ``every`` is a number of steps."""
        return self.every if isinstance(self.every, int) else None

    @property
    def seconds(self) -> float | None:
        """Number of seconds between checkpoints, if ``every`` is a time."""
        span = _SPAN.fullmatch(self.every) if isinstance(self.every, str) else None
        return float(span[1]) * _UNITS[span[2]] if span else None


def _explain_folder(name: str) -> str | None:
    """Explain what the folder of checkpoints is called."""
    return "did you mean `uri`?" if name in ("checkpoint", "folder", "path") else None


@name_arguments
@dataclass(frozen=True)
class Recovery:
    """Save the state of a training run, resume it, and restart its workers.

    With ``uri``, the state of training is saved in checkpoints. A checkpoint holds the weights and
    all other variables of the model, its loss, metrics and optimizers, the random generators of
    each worker, callback attributes that are plain data or arrays, and the history. It is written
    in the background, and is either complete or absent. A training run that resumes from it ends
    with weights and history that are bit-for-bit identical to those of an uninterrupted run.
    Callbacks must have the same settings, except for paths. The following is not saved:

    - TensorFlow's own stateful random operations (``tf.random.uniform``; ``keras.random`` with a
      ``SeedGenerator`` is saved);
    - Python attributes that callbacks change on layers or optimizers (``trainable``, ``clipnorm``,
      a dropout's ``rate``; a learning rate is a variable, so it is saved);
    - the output of callbacks: files contain the repeated epochs twice, except for a `CSVLogger`
      file on a disk.

    If a worker receives SIGTERM, as happens before a preemption, all workers save one more
    checkpoint, at the same step, and exit.

    With ``jit_compile=True``, the results are identical only if the uninterrupted run uses a
    checkpoint, too, because XLA rounds differently without one.

    Parameters
    ----------
    uri
        A folder for this training run only: a path that the machines of all workers share, or a URI
        for fsspec. On one machine it may be any path. None (default): nothing is saved.
    every
        Time between checkpoints: ``"epoch"`` (default), a number of steps, or a time such as
        ``"600s"``, ``"10min"`` or ``"1h"``. The final state is always saved.
    keep
        Maximum number of checkpoints. Training stops with an error if this many in a row, but at
        least two, could not be written.
    resume
        True: resume from the newest intact checkpoint, or start from the beginning if there is
        none. False (default): the folder must not contain checkpoints.
    restarts
        Number of times that the workers are restarted after one was lost, killed or stopped, or ran
        out of memory: from the newest checkpoint, or without ``uri`` from the beginning. With
        ``uri``, they are also restarted after a preemption (SIGTERM, an eviction) and after the
        time limit of a job. Errors that the model, the data or a callback raises are not retried.
    timeout
        Seconds that workers wait for each other to start. After the same time, a worker counts as
        lost if it was stopped or its machine does not answer. For a worker that is merely slow, the
        others wait up to six hours, and a note names it once a minute.
    pause
        Seconds before a restart if the workers could not be started, as when a host boots. The
        pause grows by this much with each restart.

    Raises
    ------
    InputError
        An option is invalid. The message names it and the expected value.
    """

    uri: str | os.PathLike[str] | None = None
    every: int | str = "epoch"
    keep: int = 2
    resume: bool = False
    restarts: int = 0
    timeout: float = 300.0
    pause: float = 5.0

    explain_missing = staticmethod(_explain_folder)

    def __post_init__(self) -> None:
        for name, value in {
            "uri": None if self.uri is None else check_uri(self.uri),
            "every": _check_every(self.every),
            "keep": check_whole_number("keep", self.keep, least=1),
            "resume": check_flag("resume", self.resume),
            "restarts": check_whole_number("restarts", self.restarts, least=0),
            "timeout": check_seconds("timeout", self.timeout),
            "pause": check_seconds("pause", self.pause),
        }.items():
            object.__setattr__(self, name, value)
        if self.uri is not None:
            return
        for one in fields(self)[1:4]:
            if (value := getattr(self, one.name)) != one.default:
                raise InputError(
                    f"{setting(**{one.name: value})} needs `uri`, the folder of the checkpoints, "
                    f"e.g. {call_of('Recovery', '/shared/run1', **{one.name: value})}"
                )

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The part for jobs; None: nothing is saved."""
        if self.uri is None:
            return None
        return Checkpoint(os.fspath(self.uri), self.every, self.keep, self.resume)


def check_recovery(value: Any) -> Recovery:
    """Check the argument ``recovery``; a path or URI is the folder, and None the default."""
    if value is None or isinstance(value, Recovery):
        return value or Recovery()
    if isinstance(value, (str, os.PathLike)):
        return Recovery(value)
    raise InputError(
        f"`recovery` must be {one_of('Recovery')}, a path or a URI, e.g. "
        f"{call_of('pybackend.Recovery', '/shared/run1', every='10min')}, not {show(value)}"
    )


def without_folder(value: Any) -> Recovery:
    """Return the argument ``recovery`` without checkpoints."""
    given = check_recovery(value)
    return replace(given, uri=None, every="epoch", keep=2, resume=False)


def check_uri(value: Any) -> str:
    """Check the folder of checkpoints; return a URI or an absolute path."""
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value):
        raise InputError(f"`uri` of a checkpoint must be a path or URI, not {show(value)}")
    uri = os.fspath(value)
    # Workers have another working directory.
    return uri if "://" in uri else os.path.abspath(uri)


def _check_every(value: Any) -> int | str:
    if value == "epoch":
        return "epoch"
    span = _SPAN.fullmatch(value) if isinstance(value, str) else None
    if span and float(span[1]) > 0:
        return str(value)
    if as_number(value) is None:
        raise InputError(
            f"`every` of a checkpoint must be {show('epoch')}, a number of steps, or a time such "
            f"as {show('600s')}, {show('10min')} or {show('1h')}, not {show(value)}"
        )
    return check_whole_number("every", value, least=1)


@contextmanager
def pointing_to(
    checkpoint: Checkpoint | None, has_checkpoint: Callable[[], bool] = lambda: True
) -> Iterator[None]:
    """Add to errors how to load the saved checkpoint.

    Parameters
    ----------
    has_checkpoint
        Whether this process can see a checkpoint there.

    Raises
    ------
    WorkerFailedError, ClusterError, SerializationError
        The errors raised in the block; an `OSError` or `MemoryError` becomes a
        `SerializationError`.
    """

    def describe() -> str:
        return _describe(checkpoint, has_checkpoint()) if checkpoint else ""

    try:
        yield
    except WorkerFailedError as error:
        if checkpoint is None or error.exception_type == "InputError":  # it would fail again
            raise
        raise error.advise(describe()) from None
    except (ClusterError, SerializationError, OSError, MemoryError) as error:
        if checkpoint is None or "load_checkpoint(" in str(error):
            raise
        kind = ClusterError if isinstance(error, ClusterError) else SerializationError
        message = str(error) or "out of memory"
        raise kind(f"{message}. {describe()}") from error


def _describe(checkpoint: Checkpoint, is_seen: bool) -> str:
    uri = repr(checkpoint.uri)
    if not is_seen:
        return (
            f"This session sees no checkpoint at {uri}. If the workers have written one there, the "
            f"same call with {call_of('Recovery', ..., resume=True)} resumes from it, and "
            f"load_checkpoint({uri}) returns its model"
        )
    return (
        f"Checkpoints are at {uri}: the same call with {call_of('Recovery', ..., resume=True)} "
        f"resumes from the newest one, and load_checkpoint({uri}) returns its model"
    )
