"""What functions written for Spark's barrier tasks find in a worker.

A worker is not Spark's own Python process but a child of it, or of no Spark at all. There
``BarrierTaskContext.get()`` gives an object that speaks with the other workers in Spark's place.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

from pybackend.errors import ClusterError
from pybackend.job.context import WorkerContext

_MODULE = "pyspark.taskcontext"


@contextmanager
def standing_in(context: WorkerContext) -> Iterator[None]:
    """Meanwhile Spark's classes for the context of a task give one that stands for this worker.

    pyspark itself is imported only if somebody else imports it.
    """
    with ExitStack() as stack:

        def install(module: ModuleType) -> None:
            stack.enter_context(_installed(module, context))

        if known := sys.modules.get(_MODULE):
            install(known)
        else:
            finder = _Finder(install)
            sys.meta_path.insert(0, finder)
            stack.callback(sys.meta_path.remove, finder)
        yield


@contextmanager
def _installed(module: Any, context: WorkerContext) -> Iterator[None]:
    stand_in = _make(module, context)
    classes = (module.TaskContext, module.BarrierTaskContext)
    kept = [vars(one)["get"] for one in classes]
    for one in classes:
        one.get = classmethod(lambda _: stand_in)
    try:
        yield
    finally:
        for one, get in zip(classes, kept, strict=True):
            one.get = get


def _make(module: Any, context: WorkerContext) -> Any:
    """An object of Spark's own class, whose methods answer for the worker."""

    class WorkerTaskContext(module.BarrierTaskContext):
        """The context of a barrier task, as far as a worker has one."""

        def __new__(cls) -> Any:
            return object.__new__(cls)  # Spark's keeps one for the process

        def allGather(self, message: str = "") -> list[str]:
            """The messages of all workers, by rank."""
            if not isinstance(message, str):
                raise TypeError(f"allGather() takes text, not {type(message).__name__}")
            return context.gather("allGather", message)

        def barrier(self) -> None:
            """Wait until all workers have called it."""
            context.barrier()

        def getTaskInfos(self) -> list[Any]:
            """The address of each worker."""
            return [module.BarrierTaskInfo(address) for address in context.addresses]

        def partitionId(self) -> int:
            """The rank."""
            return context.rank

        def taskAttemptId(self) -> int:
            """The rank: a worker is not a task of Spark's."""
            return context.rank

        def attemptNumber(self) -> int:
            """A worker is started once."""
            return 0

        def stageId(self) -> int:
            """All workers are one stage."""
            return 0

        def cpus(self) -> int:
            """Cores that this worker may use."""
            return int(os.environ.get("TF_NUM_INTRAOP_THREADS", "1"))

        def resources(self) -> dict[str, Any]:
            """The GPUs of this worker, as Spark describes them."""
            gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
            information = importlib.import_module("pyspark.resource").ResourceInformation
            return {"gpu": information("gpu", gpus)} if gpus and gpus != ["-1"] else {}

        def getLocalProperty(self, key: str) -> str | None:
            """Refused: what the driver has set does not reach the workers."""
            raise ClusterError(
                f"the local property {key!r} of Spark does not reach the workers: pass it as an "
                "argument of the function"
            )

    return WorkerTaskContext()


class _Finder(importlib.abc.MetaPathFinder):
    """Calls ``install`` when the module of Spark's contexts has been imported."""

    def __init__(self, install: Any) -> None:
        self._install = install
        self._is_looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own spec, with a loader that does one thing more."""
        if fullname != _MODULE or self._is_looking:
            return None
        self._is_looking = True  # the others are asked now
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._is_looking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._install)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, loader: Any, install: Any) -> None:
        self._loader = loader
        self._install = install

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        """As the module's own loader."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """As the module's own loader; then the stand-in is there."""
        self._loader.exec_module(module)
        self._install(module)
