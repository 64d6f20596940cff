"""Replacement for Spark's task context in a worker, for functions written for barrier tasks.

A worker is not Spark's own Python process but a child of it, or runs without Spark. There,
``BarrierTaskContext.get()`` returns an object that communicates with the other workers itself.
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

from pybackend.core.errors import ClusterError
from pybackend.core.job.context import WorkerContext
from pybackend.core.words import show

_MODULE = "pyspark.taskcontext"


@contextmanager
def standing_in(context: WorkerContext) -> Iterator[None]:
    """Make the ``get()`` of Spark's task context classes return a context of this worker.

    This does not import pyspark.
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
    originals = [vars(one)["get"] for one in classes]
    for one in classes:
        one.get = classmethod(lambda _: stand_in)
    try:
        yield
    finally:
        for one, get in zip(classes, originals, strict=True):
            one.get = get


def _make(module: Any, context: WorkerContext) -> Any:
    """Return an instance of Spark's class whose methods describe the worker."""

    class WorkerTaskContext(module.BarrierTaskContext):
        """Context of a barrier task, with the methods that a worker supports."""

        def __new__(cls) -> Any:
            return object.__new__(cls)  # Spark's class holds one instance per process

        def allGather(self, message: str = "") -> list[str]:
            """Return the messages of all workers, by rank."""
            if not isinstance(message, str):
                raise TypeError(f"allGather() takes a string, not {type(message).__name__}")
            return context.gather("allGather", message)

        def barrier(self) -> None:
            """Wait until all workers have called `barrier`."""
            context.barrier()

        def getTaskInfos(self) -> list[Any]:
            """Return the address of each worker."""
            return [module.BarrierTaskInfo(address) for address in context.addresses]

        def partitionId(self) -> int:
            """Return the rank."""
            return context.rank

        def taskAttemptId(self) -> int:
            """Return the rank: a worker is not a Spark task."""
            return context.rank

        def attemptNumber(self) -> int:
            """Return 0: a worker is started once."""
            return 0

        def stageId(self) -> int:
            """Return 0: all workers are in one stage."""
            return 0

        def cpus(self) -> int:
            """Return the cores that this worker may use."""
            return int(os.environ.get("TF_NUM_INTRAOP_THREADS", "1"))

        def resources(self) -> dict[str, Any]:
            """Return the GPUs of this worker in Spark's format."""
            gpus = [gpu for gpu in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if gpu]
            information = importlib.import_module("pyspark.resource").ResourceInformation
            return {"gpu": information("gpu", gpus)} if gpus and gpus != ["-1"] else {}

        def getLocalProperty(self, key: str) -> str | None:
            """Raise `ClusterError`: the driver's local properties do not reach the workers."""
            raise ClusterError(
                f"Spark's local property {show(key)} does not reach the workers: pass it as an "
                "argument of the function"
            )

    return WorkerTaskContext()


class _Finder(importlib.abc.MetaPathFinder):
    """Import hook that calls ``install`` after the module of Spark's contexts is imported."""

    def __init__(self, install: Any) -> None:
        self._install = install
        self._is_looking = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's spec, with a loader that also calls ``install``."""
        if fullname != _MODULE or self._is_looking:
            return None
        self._is_looking = True  # for the other finders, which are asked now
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
        """Create the module with its own loader."""
        made: ModuleType | None = self._loader.create_module(spec)
        return made

    def exec_module(self, module: ModuleType) -> None:
        """Execute the module with its own loader, then install the worker's context."""
        self._loader.exec_module(module)
        self._install(module)
