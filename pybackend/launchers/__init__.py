"""Where workers are started; the only part of this package that others import.

A launcher is one file behind the `Launcher` protocol, and a line in the table below.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from pybackend.errors import InputError
from pybackend.job.messages import Emit
from pybackend.launchers.base import Launcher, Outcome

# Names, and a module, that need pyspark: loaded when they are first used.
_HOME = {
    "SparklyrWorkers": "spark.sparklyr",
    "attach_spark": "spark.attach",
    "frame_of_predictions": "spark.predict",
}
__all__ = [
    "Emit",
    "Launcher",
    "Outcome",
    "SparklyrWorkers",
    "attach_spark",
    "frame_of_predictions",
    "launcher_for",
    "records",
]

# What a first argument may be besides a launcher itself: the module whose `launcher_of` knows it,
# and a package that is loaded if there is such an argument at all.
_KNOWN = {
    "pybackend.launchers.local": None,
    "pybackend.launchers.spark.barrier": "pyspark",
}


def launcher_for(target: Any) -> Launcher:
    """The launcher that the first argument of a call means.

    Parameters
    ----------
    target
        None or ``"local"``, a ``pyspark.sql.SparkSession``, or a launcher.

    Raises
    ------
    InputError
        It is none of these.
    """
    if isinstance(target, Launcher):
        return target
    for module, package in _KNOWN.items():
        if package is None or package in sys.modules:
            found: Launcher | None = importlib.import_module(module).launcher_of(target)
            if found is not None:
                return found
    kind = type(target).__name__
    shown = repr(target) if isinstance(target, (str, int, float)) else f"a {kind}"
    hint = " (pass SparkSession.builder.getOrCreate())" if kind == "SparkContext" else ""
    raise InputError(f"`spark` must be None, 'local' or a SparkSession, not {shown}{hint}")


def __getattr__(name: str) -> Any:
    if name == "records":
        return importlib.import_module("pybackend.launchers.spark.records")
    if name not in _HOME:
        raise AttributeError(f"module 'pybackend.launchers' has no attribute {name!r}")
    return getattr(importlib.import_module(f"pybackend.launchers.{_HOME[name]}"), name)
