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

__all__ = [
    "Emit",
    "Launcher",
    "Outcome",
    "launcher_for",
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
