"""Starting workers; the only part of this package that others import.

A launcher is one file behind the `Launcher` protocol, and a line in the table below. What else is
done with Spark is found here too, and loaded when it is used.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from pybackend.errors import InputError
from pybackend.job.messages import Emit
from pybackend.launchers.base import Launcher, Outcome

if TYPE_CHECKING:
    from pybackend.launchers.spark.attach import attach_spark
    from pybackend.launchers.spark.executors import ask_executors
    from pybackend.launchers.spark.predict import add_predictions
    from pybackend.launchers.spark.records import read_records, write_records
    from pybackend.launchers.spark.session import is_session, is_spark_frame, read_schema
    from pybackend.launchers.spark.slots import check_slots, count_slots
    from pybackend.launchers.spark.sparklyr import SparklyrWorkers

__all__ = [
    "Emit",
    "Launcher",
    "Outcome",
    "SparklyrWorkers",
    "add_predictions",
    "ask_executors",
    "attach_spark",
    "check_slots",
    "count_slots",
    "is_session",
    "is_spark_frame",
    "launcher_for",
    "read_records",
    "read_schema",
    "write_records",
]

# Names that are loaded when they are used, and their modules.
_HOME = {
    "SparklyrWorkers": "spark.sparklyr",
    "add_predictions": "spark.predict",
    "ask_executors": "spark.executors",
    "attach_spark": "spark.attach",
    "check_slots": "spark.slots",
    "count_slots": "spark.slots",
    "is_spark_frame": "spark.session",
    "is_session": "spark.session",
    "read_records": "spark.records",
    "read_schema": "spark.session",
    "write_records": "spark.records",
}

# A first argument that is not a launcher itself: the module whose `launcher_of` recognizes it,
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
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
