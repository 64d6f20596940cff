"""Adapters for functions not written for these workers: scripts, and functions of Spark's tasks.

A worker is not Spark's own Python process but a child of it, or runs without Spark. There,
``BarrierTaskContext.get()`` returns an object that communicates with the other workers itself.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.context import WorkerContext
from pybackend.core.words import show

_GPUS = "CUDA_VISIBLE_DEVICES"
_MODULE = "pyspark.taskcontext"


@dataclass(frozen=True)
class RankZero:
    """Call a function without a `WorkerContext`, and return its value on rank 0, None elsewhere."""

    fn: Callable[..., Any]
    # Total number of GPUs, divided among the workers as evenly as possible; None: each worker uses
    # all that it was given.
    gpus: int | None = None
    chosen: tuple[str, ...] | None = None  # the GPUs of a single worker
    is_mirrored: bool = False  # call in the scope of a `MultiWorkerMirroredStrategy`

    def __call__(self, context: WorkerContext, /, *args: Any, **kwargs: Any) -> Any:
        if self.chosen is not None:
            os.environ[_GPUS] = ",".join(self.chosen)
        elif self.gpus is not None:
            os.environ[_GPUS] = ",".join(_share(self.gpus, context))
        with _mirrored() if self.is_mirrored else nullcontext():
            value = self.fn(*args, **kwargs)
        return value if context.rank == 0 else None


def _share(gpus: int, context: WorkerContext) -> list[str]:
    wanted = gpus // context.world_size + (context.rank < gpus % context.world_size)
    given = _list_gpus()
    if wanted > len(given):
        advice = "set spark.executor.resource.gpu.amount and spark.task.resource.gpu.amount"
        assigned = f"its task was assigned {len(given)}"
        raise ClusterError(f"worker {context.rank} needs {wanted} GPUs, but {assigned}: {advice}")
    return given[:wanted]


def _list_gpus() -> list[str]:
    return [gpu for gpu in os.environ.get(_GPUS, "").split(",") if gpu]


def _mirrored() -> Any:
    tf: Any = importlib.import_module("tensorflow")
    return tf.distribute.MultiWorkerMirroredStrategy().scope()


@dataclass(frozen=True)
class Script:
    """Run a script like ``python script.py ...``; the workers' machines need no copy of it.

    ``path`` is that of the script on the driver.
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
        with suppress(OSError):
            if Path(self.path).read_bytes() == self.content:
                return self.path
        copy = Path(tempfile.mkdtemp(), os.path.basename(self.path))  # in the worker's folder
        copy.write_bytes(self.content)
        return str(copy)


def read_script(path: str | os.PathLike[str]) -> Script:
    """Read a script for the workers to run.

    Raises `InputError` if it is not a Python file, or cannot be read or parsed.
    """
    shown = os.path.abspath(os.fspath(path))
    if not shown.endswith(".py"):
        expected = "a function or the path of a .py file"
        raise InputError(f"`fn` must be {expected}, not {show(os.fspath(path))}")
    try:
        content = Path(shown).read_bytes()
        compile(content, shown, "exec", dont_inherit=True)
    except OSError as error:
        raise InputError(f"`fn`: the script {shown} cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise InputError(f"`fn`: the script {shown} is not Python: {error}") from error
    return Script(shown, content)


@contextmanager
def standing_in(context: WorkerContext) -> Iterator[None]:
    """Make the ``get()`` of Spark's task context classes return a context of this worker.

    This does not import pyspark.
    """
    with ExitStack() as stack:
        finder = _Finder(lambda module: stack.enter_context(_installed(module, context)))
        if known := sys.modules.get(_MODULE):
            finder.use(known)
        else:
            sys.meta_path.insert(0, finder)
            stack.callback(sys.meta_path.remove, finder)
        yield


@contextmanager
def _installed(module: Any, context: WorkerContext) -> Iterator[None]:
    stand_in = _make(module, context)
    classes = (module.TaskContext, module.BarrierTaskContext)
    originals = [vars(one)["get"] for one in classes]
    for one in classes:
        one.get = classmethod(lambda _: stand_in)
    try:
        yield
    finally:
        for one, get in zip(classes, originals, strict=True):
            one.get = get


def _make(module: Any, context: WorkerContext) -> Any:
    class WorkerTaskContext(module.BarrierTaskContext):
        """Context of a barrier task, with the methods that a worker supports.

        A worker is not a Spark task: its IDs are its rank. It is started once, in one stage with
        all others.
        """

        def __new__(cls) -> Any:
            return object.__new__(cls)  # Spark's class holds one instance per process

        def allGather(self, message: str = "") -> list[str]:
            if not isinstance(message, str):
                raise TypeError(f"allGather() takes a string, not {type(message).__name__}")
            return context.gather("allGather", message)

        def barrier(self) -> None:
            context.barrier()

        def getTaskInfos(self) -> list[Any]:
            return [module.BarrierTaskInfo(address) for address in context.addresses]

        def partitionId(self) -> int:
            return context.rank

        def attemptNumber(self) -> int:
            return 0

        taskAttemptId, stageId = partitionId, attemptNumber

        def cpus(self) -> int:
            return int(os.environ.get("TF_NUM_INTRAOP_THREADS", "1"))

        def resources(self) -> dict[str, Any]:
            gpus = _list_gpus()
            information = importlib.import_module("pyspark.resource").ResourceInformation
            return {"gpu": information("gpu", gpus)} if gpus and gpus != ["-1"] else {}

        def getLocalProperty(self, key: str) -> str | None:
            reason = f"Spark's local property {show(key)} does not reach the workers"
            raise ClusterError(f"{reason}: pass it as an argument of the function")

    return WorkerTaskContext()


@dataclass
class _Finder(importlib.abc.MetaPathFinder):
    """Import hook that calls ``use`` after the module of Spark's contexts is imported."""

    use: Callable[[ModuleType], object]
    _is_looking: bool = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MODULE or self._is_looking:
            return None
        self._is_looking = True  # for the other finders, which are asked now
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.use)
        return spec


@dataclass
class _Loader(importlib.abc.Loader):
    loader: Any
    use: Callable[[ModuleType], object]

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        made: ModuleType | None = self.loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        self.use(module)
