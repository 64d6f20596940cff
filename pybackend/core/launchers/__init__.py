"""Start workers. Other packages, except `tfos.feed`, import only from this module.

A launcher implements the `Launcher` protocol. Those that recognize a first argument themselves have
a line in the table below. What other packages need of the modules here, such as functions for Spark
and scripts, can also be imported from here, and is loaded on first use.
"""

from __future__ import annotations

import importlib
import sys
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, cast

from pybackend.core.errors import InputError
from pybackend.core.job.messages import Emit as Emit
from pybackend.core.launchers.base import Bound as Bound
from pybackend.core.launchers.base import Checking as Checking
from pybackend.core.launchers.base import DataSets as DataSets
from pybackend.core.launchers.base import Describing as Describing
from pybackend.core.launchers.base import Dividing as Dividing
from pybackend.core.launchers.base import Files as Files
from pybackend.core.launchers.base import Launcher as Launcher
from pybackend.core.launchers.base import Outcome as Outcome
from pybackend.core.launchers.base import Slotted
from pybackend.core.launchers.base import StopRequestedError as StopRequestedError
from pybackend.core.launchers.base import Submission as Submission
from pybackend.core.launchers.base import check_stop as check_stop
from pybackend.core.launchers.base import holding as holding
from pybackend.core.launchers.base import stopped_by as stopped_by
from pybackend.core.launchers.base import warm_up as warm_up
from pybackend.core.words import show, term

if TYPE_CHECKING:
    from pybackend.core.launchers.environment.archive import PackedEnvironment as PackedEnvironment
    from pybackend.core.launchers.environment.archive import (
        pack_environment_of as pack_environment_of,
    )
    from pybackend.core.launchers.fork_server import start_fork_server as start_fork_server
    from pybackend.core.launchers.fork_server import without_fork_server as without_fork_server
    from pybackend.core.launchers.package_files import own_libraries as own_libraries
    from pybackend.core.launchers.package_files import run_here as run_here
    from pybackend.core.launchers.script.driver import run_script as run_script
    from pybackend.core.launchers.script.run_options import add_run_options as add_run_options
    from pybackend.core.launchers.script.run_options import read_run_plan as read_run_plan
    from pybackend.core.launchers.script.slurm import describe_batch as describe_batch
    from pybackend.core.launchers.spark.barrier import SparkLauncher as SparkLauncher
    from pybackend.core.launchers.spark.explain import ask_executors as ask_executors
    from pybackend.core.launchers.spark.explain import quiet_log as quiet_log
    from pybackend.core.launchers.spark.predicted_columns import add_predictions as add_predictions
    from pybackend.core.launchers.spark.predicted_columns import (
        set_up_tensorflow as set_up_tensorflow,
    )
    from pybackend.core.launchers.spark.sessions import Handover as Handover
    from pybackend.core.launchers.spark.sessions import ask as ask
    from pybackend.core.launchers.spark.sessions import driver_python as driver_python
    from pybackend.core.launchers.spark.sessions import get_session as get_session
    from pybackend.core.launchers.spark.sessions import hand_over as hand_over
    from pybackend.core.launchers.spark.sessions import is_session as is_session
    from pybackend.core.launchers.spark.sessions import is_spark_frame as is_spark_frame
    from pybackend.core.launchers.spark.sessions import read_schema as read_schema
    from pybackend.core.launchers.spark.sessions import read_setting as read_setting
    from pybackend.core.launchers.spark.sessions import ship_package as ship_package
    from pybackend.core.launchers.spark.sessions import small_batches as small_batches
    from pybackend.core.launchers.spark.slots import check_slots as check_slots
    from pybackend.core.launchers.spark.slots import count_slots as count_slots
    from pybackend.core.launchers.spark.spark_jobs import run_watched as run_watched
    from pybackend.core.launchers.spark.spark_records import call_in_task as call_in_task
    from pybackend.core.launchers.spark.spark_records import read_records as read_records
    from pybackend.core.launchers.spark.spark_records import write_records as write_records
    from pybackend.core.launchers.spark.sparklyr import SparklyrWorkers as SparklyrWorkers
    from pybackend.core.launchers.spark.sparklyr import attach_spark as attach_spark

# Names that are loaded on first use, by module.
_NAMES = {
    "environment.archive": "PackedEnvironment pack_environment_of",
    "fork_server": "start_fork_server without_fork_server",
    "package_files": "own_libraries run_here",
    "script.driver": "run_script",
    "script.run_options": "add_run_options read_run_plan",
    "script.slurm": "describe_batch",
    "spark.barrier": "SparkLauncher",
    "spark.explain": "ask_executors quiet_log",
    "spark.spark_jobs": "run_watched",
    "spark.predicted_columns": "add_predictions set_up_tensorflow",
    "spark.spark_records": "call_in_task read_records write_records",
    "spark.sessions": "Handover ask driver_python get_session hand_over is_session is_spark_frame "
    "read_schema read_setting ship_package small_batches",
    "spark.slots": "check_slots count_slots",
    "spark.sparklyr": "SparklyrWorkers attach_spark",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

# First arguments that are not launchers: the module whose `launcher_of` recognizes them, and a
# package that must be loaded for such an argument to exist.
_KNOWN = {
    "pybackend.core.launchers.joined.launcher": None,
    "pybackend.core.launchers.local": None,
    "pybackend.core.launchers.spark.barrier": "pyspark",
}

# Entry points of other packages: functions that return a launcher for a first argument, or None.
_GROUP = "tfdist.launchers"


def launcher_for(target: Any) -> Launcher:
    """Return the launcher for the first argument of a call, or raise `InputError`.

    None means this machine unless the environment shows that this process is one of several. Entry
    points in the group ``tfdist.launchers`` may know further values.
    """
    if isinstance(target, Launcher):
        return target
    for module, package in _KNOWN.items():
        if package is None or package in sys.modules:
            found: Launcher | None = importlib.import_module(module).launcher_of(target)
            if found is not None:
                return found
    for other in entry_points(group=_GROUP):  # read only if nothing here knows the argument
        if (made := other.load()(target)) is not None:
            return cast("Launcher", made)
    kind = type(target).__name__
    shown = show(target) if isinstance(target, (str, int, float)) else f"a {kind}"
    hint = " (pass SparkSession.builder.getOrCreate())" if kind == "SparkContext" else ""
    raise InputError(
        f"`{term('spark')}` must be {show(None)}, {show('local')}, a SparkSession, or made by "
        f"hosts(), slurm() or kubernetes(), not {shown}{hint}"
    )


def count_workers(launcher: Launcher, workers: Any, default: int = 2) -> Any:
    """Return the number of workers of a call: its own, the launcher's, or the default.

    `InputError` if the call requests a different number than the launcher has.
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
