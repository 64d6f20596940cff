"""Start workers. Other packages import only from this module.

A launcher is one file that implements the `Launcher` protocol, and a line in the table below. The
other functions, for Spark and scripts, can also be imported from here, and are loaded on first use.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from pybackend.errors import InputError
from pybackend.job.messages import Emit
from pybackend.launchers.base import Checking, Describing, Launcher, Outcome, Slotted, Submission
from pybackend.words import show, term

if TYPE_CHECKING:
    from pybackend.launchers.fork_server import without_fork_server
    from pybackend.launchers.script.options import add_run_options, read_run_plan
    from pybackend.launchers.script.run import run_script
    from pybackend.launchers.slurm.batch import describe_batch
    from pybackend.launchers.spark.attach import attach_spark
    from pybackend.launchers.spark.barrier import SparkLauncher
    from pybackend.launchers.spark.detached import DetachedLauncher
    from pybackend.launchers.spark.explain import ask_executors, quiet_log
    from pybackend.launchers.spark.feeding import FED_SCHEMA, FeedFrame, FeedItems, InferItems
    from pybackend.launchers.spark.jobs import run_watched
    from pybackend.launchers.spark.predict import add_predictions
    from pybackend.launchers.spark.preflight import small_batches
    from pybackend.launchers.spark.python import driver_python
    from pybackend.launchers.spark.records import read_records, write_records
    from pybackend.launchers.spark.saved_model import apply_saved_model
    from pybackend.launchers.spark.saved_model_task import SavedModel
    from pybackend.launchers.spark.session import (
        get_session,
        is_session,
        is_spark_frame,
        read_schema,
    )
    from pybackend.launchers.spark.slots import check_slots, count_slots, read_setting
    from pybackend.launchers.spark.sparklyr import SparklyrWorkers

__all__ = [
    "FED_SCHEMA",
    "Checking",
    "Describing",
    "DetachedLauncher",
    "Emit",
    "FeedFrame",
    "FeedItems",
    "InferItems",
    "Launcher",
    "Outcome",
    "SavedModel",
    "SparkLauncher",
    "SparklyrWorkers",
    "Submission",
    "add_predictions",
    "add_run_options",
    "apply_saved_model",
    "ask_executors",
    "attach_spark",
    "check_slots",
    "count_slots",
    "count_workers",
    "describe_batch",
    "driver_python",
    "get_session",
    "is_session",
    "is_spark_frame",
    "launcher_for",
    "quiet_log",
    "read_records",
    "read_run_plan",
    "read_schema",
    "read_setting",
    "run_script",
    "run_watched",
    "small_batches",
    "without_fork_server",
    "write_records",
]

# Names that are loaded on first use, and their modules.
_HOME = {
    "FED_SCHEMA": "spark.feeding",
    "DetachedLauncher": "spark.detached",
    "FeedFrame": "spark.feeding",
    "FeedItems": "spark.feeding",
    "InferItems": "spark.feeding",
    "SavedModel": "spark.saved_model_task",
    "SparkLauncher": "spark.barrier",
    "SparklyrWorkers": "spark.sparklyr",
    "apply_saved_model": "spark.saved_model",
    "add_predictions": "spark.predict",
    "add_run_options": "script.options",
    "ask_executors": "spark.explain",
    "attach_spark": "spark.attach",
    "check_slots": "spark.slots",
    "count_slots": "spark.slots",
    "describe_batch": "slurm.batch",
    "driver_python": "spark.python",
    "get_session": "spark.session",
    "is_session": "spark.session",
    "is_spark_frame": "spark.session",
    "quiet_log": "spark.explain",
    "read_records": "spark.records",
    "read_run_plan": "script.options",
    "read_schema": "spark.session",
    "read_setting": "spark.slots",
    "run_script": "script.run",
    "run_watched": "spark.jobs",
    "small_batches": "spark.preflight",
    "without_fork_server": "fork_server",
    "write_records": "spark.records",
}

# First arguments that are not launchers: the module whose `launcher_of` recognizes them, and a
# package that must be loaded for such an argument to exist.
_KNOWN = {
    "pybackend.launchers.joined.launcher": None,
    "pybackend.launchers.local": None,
    "pybackend.launchers.spark.barrier": "pyspark",
}


def launcher_for(target: Any) -> Launcher:
    """Return the launcher for the first argument of a call.

    Parameters
    ----------
    target
        None, which means this machine unless the environment shows that this process is one of
        several; ``"local"``, a ``pyspark.sql.SparkSession``, or a launcher.

    Raises
    ------
    InputError
        ``target`` has a different type or value.
    """
    if isinstance(target, Launcher):
        return target
    for module, package in _KNOWN.items():
        if package is None or package in sys.modules:
            found: Launcher | None = importlib.import_module(module).launcher_of(target)
            if found is not None:
                return found
    kind = type(target).__name__
    shown = show(target) if isinstance(target, (str, int, float)) else f"a {kind}"
    hint = " (pass SparkSession.builder.getOrCreate())" if kind == "SparkContext" else ""
    raise InputError(
        f"`{term('spark')}` must be {show(None)}, {show('local')}, a SparkSession, or made by "
        f"hosts(), slurm() or kubernetes(), not {shown}{hint}"
    )


def count_workers(launcher: Launcher, workers: Any, default: int = 2) -> Any:
    """Return the number of workers of a call: its own, the launcher's, or the default.

    Raises
    ------
    InputError
        The call requests a different number than the launcher has.
    """
    if isinstance(launcher, Slotted):
        counted = launcher.count_workers(workers)
        return default if counted is None else counted
    if launcher.workers is None:
        return default if workers is None else workers
    if workers not in (None, launcher.workers):
        raise InputError(
            f"`workers` is {show(workers)}, but {launcher.workers} processes were started to train "
            "together: omit `workers`"
        )
    return launcher.workers


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
