"""Adapt scripts and functions that are not aware of workers, so that workers can run them."""

from __future__ import annotations

import importlib
import os
import runpy
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.context import WorkerContext
from pybackend.core.words import show

_GPUS = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class RankZero:
    """Call a function without a `WorkerContext`, and return its value on rank 0.

    Attributes
    ----------
    fn
        The function.
    gpus
        Total number of GPUs, divided among the workers as evenly as possible; None: each worker
        uses all GPUs that it was given.
    chosen
        GPUs of a single worker.
    is_mirrored
        Whether the function is called in the scope of a ``MultiWorkerMirroredStrategy``.
    """

    fn: Callable[..., Any]
    gpus: int | None = None
    chosen: tuple[str, ...] | None = None
    is_mirrored: bool = False

    def __call__(self, context: WorkerContext, /, *args: Any, **kwargs: Any) -> Any:
        """Return the function's value on rank 0, None elsewhere."""
        if self.chosen is not None:
            os.environ[_GPUS] = ",".join(self.chosen)
        elif self.gpus is not None:
            os.environ[_GPUS] = ",".join(_share(self.gpus, context))
        call = _call_mirrored if self.is_mirrored else _call
        value = call(self.fn, args, kwargs)
        return value if context.rank == 0 else None


def _share(gpus: int, context: WorkerContext) -> list[str]:
    """Return this worker's share of the GPUs, from those that it was given."""
    wanted = gpus // context.world_size + (context.rank < gpus % context.world_size)
    given = [gpu for gpu in os.environ.get(_GPUS, "").split(",") if gpu]
    if wanted > len(given):
        raise ClusterError(
            f"worker {context.rank} needs {wanted} GPUs, but its task was assigned {len(given)}: "
            "set spark.executor.resource.gpu.amount and spark.task.resource.gpu.amount"
        )
    return given[:wanted]


def _call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return fn(*args, **kwargs)


def _call_mirrored(fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    tf: Any = importlib.import_module("tensorflow")
    with tf.distribute.MultiWorkerMirroredStrategy().scope():
        return fn(*args, **kwargs)


@dataclass(frozen=True)
class Script:
    """Run a script like ``python script.py ...``; the workers' machines need no copy of it.

    Attributes
    ----------
    path
        Path of the script on the driver.
    content
        Content of the script.
    """

    path: str
    content: bytes = field(repr=False)

    def __call__(self, context: WorkerContext, *arguments: Any) -> None:
        """Run the script as ``__main__``, with these arguments converted to text."""
        path = self._find()
        sys.argv = [path, *map(str, arguments)]
        sys.path.insert(0, os.path.dirname(path))
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                how = f"status {end.code}" if isinstance(end.code, int) else f"{end.code}"
                raise SystemExit(f"{os.path.basename(path)} exited with {how}") from None

    def _find(self) -> str:
        """Return the path of the same script on this machine, or of a new copy."""
        try:
            if Path(self.path).read_bytes() == self.content:
                return self.path
        except OSError:
            pass
        copy = Path(tempfile.mkdtemp(), os.path.basename(self.path))  # in the worker's folder
        copy.write_bytes(self.content)
        return str(copy)


def read_script(path: str | os.PathLike[str]) -> Script:
    """Read a script for the workers to run.

    Raises
    ------
    InputError
        It is not a Python file, or cannot be read or parsed.
    """
    shown = os.path.abspath(os.fspath(path))
    if not shown.endswith(".py"):
        raise InputError(
            f"`fn` must be a function or the path of a .py file, not {show(os.fspath(path))}"
        )
    try:
        content = Path(shown).read_bytes()
        compile(content, shown, "exec", dont_inherit=True)
    except OSError as error:
        raise InputError(f"`fn`: the script {shown} cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise InputError(f"`fn`: the script {shown} is not Python: {error}") from error
    return Script(shown, content)
