"""Independent runs of one function on all executors."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pybackend.core.api.call_data import check_takes
from pybackend.core.api.function_run import run_function
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import check_flag, check_whole_number
from pybackend.core.job.context import WorkerContext
from pybackend.core.launchers import count_slots
from pybackend.tfos.TFSparkNode import TFNodeContext
from pybackend.tfos.util import default_fs, session_of


def run(
    sc: Any,
    map_fn: Callable[[Any, Any], Any],
    tf_args: Any,
    num_executors: int,
    use_barrier: bool = True,
) -> None:
    """Run a function several times, in processes that do not communicate.

    Parameters
    ----------
    sc
        A SparkContext.
    map_fn
        Called as ``map_fn(tf_args, ctx)`` with a `TFNodeContext`, in a separate process.
    tf_args
        Its first argument.
    num_executors
        Number of runs.
    use_barrier
        True: all run at the same time; it is an error if Spark has too few slots. False: as many
        run at a time as there are slots.

    Raises
    ------
    InputError, ClusterError, WorkerFailedError
        As in `barrier_run`.
    """
    session = session_of(sc)
    count = check_whole_number("num_executors", num_executors, least=1)
    if not callable(map_fn):
        raise InputError(f"`map_fn` must be a function, not {type(map_fn).__name__}")
    check_takes(map_fn, "map_fn(tf_args, ctx)", tf_args, None)
    is_joint = check_flag("use_barrier", use_barrier)
    together = count if is_joint else min(count, max(1, count_slots(session)))
    file_system = default_fs(session.sparkContext)
    for first in range(0, count, together):
        args = (map_fn, tf_args, first, count, file_system)
        workers = min(together, count - first)
        run_function(session, _run_alone, args, {}, workers=workers, verbose=2)


def _run_alone(
    context: WorkerContext, map_fn: Any, tf_args: Any, first: int, count: int, file_system: str
) -> None:
    os.environ.pop("TF_CONFIG", None)
    ctx = TFNodeContext(first + context.rank, defaultFS=file_system)
    ctx.num_workers = count
    map_fn(tf_args, ctx)
