"""Whether a Spark session can start all workers at once, told before it is asked to."""

from __future__ import annotations

import re
import time
from typing import Any

from pybackend.errors import ClusterError

# Executors of a cluster register one after another once the session exists.
_REGISTER_SECONDS = 30.0


def check_slots(session: Any, workers: int) -> None:
    """Refuse a job for which Spark would wait ten minutes and then fail.

    Raises
    ------
    ClusterError
        A stopped session, too few slots, or dynamic allocation, with what to change.
    """
    _refuse_stopped(session)
    if _allocates_dynamically(session):
        raise ClusterError(
            "dynamic allocation is on, and Spark's barrier mode does not work with it: start the "
            "session with spark.dynamicAllocation.enabled=false and spark.executor.instances set"
        )
    if is_connect(session):  # a Connect client cannot see the cluster: Spark itself will tell
        return
    slots, fixed = _slots(session)
    deadline = time.monotonic() + _REGISTER_SECONDS
    while slots < workers and not fixed and time.monotonic() < deadline:
        time.sleep(0.5)
        slots, fixed = _slots(session)
    if slots < workers:
        raise ClusterError(
            f"workers={workers}, but this Spark session runs at most {slots} "
            f"task{'s' if slots != 1 else ''} at a time "
            f"(master {session.sparkContext.master}): use workers={max(slots, 1)} or fewer, or "
            "start the session with more executors or cores"
        )


def _allocates_dynamically(session: Any) -> bool:
    if not is_connect(session) and str(session.sparkContext.master).startswith("local["):
        return False  # Spark ignores the setting there
    return (setting(session, "spark.dynamicAllocation.enabled") or "").lower() == "true"


def _refuse_stopped(session: Any) -> None:
    try:
        if is_connect(session):
            _ = session.version
        else:
            _ = session.sparkContext.defaultParallelism
    except Exception as error:
        raise ClusterError(
            f"this Spark session does not answer ({type(error).__name__}): it was stopped, or its "
            "server is gone. Start a new one"
        ) from error


def is_connect(session: Any) -> bool:
    """Whether this is a Spark Connect session."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def is_one_machine(session: Any) -> bool:
    """Whether driver and workers share this machine, so that loopback reaches them all."""
    return not is_connect(session) and str(session.sparkContext.master).startswith("local")


def setting(session: Any, name: str) -> str | None:
    """A setting of the session or its context, None where unset or hidden."""
    if not is_connect(session):
        value = session.sparkContext.getConf().get(name)
        return None if value is None else str(value)
    try:
        value = session.conf.get(name, None)
    except Exception:  # Connect refuses to show some
        return None
    return None if value is None else str(value)


def _slots(session: Any) -> tuple[int, bool]:
    """Tasks that can run at once, and whether that number is final."""
    context = session.sparkContext
    per_task = int(setting(session, "spark.task.cpus") or 1)
    master = str(context.master)
    if cluster := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master):
        return int(cluster[1]) * (int(cluster[2]) // per_task), True
    # In local mode, and in a cluster once its executors have registered, Spark's default
    # parallelism is the number of cores, unless the user has set it to something else.
    if setting(session, "spark.default.parallelism") is None:
        return int(context.defaultParallelism) // per_task, master.startswith("local")
    if local := re.fullmatch(r"local\[(\d+)(,.*)?\]", master):
        return int(local[1]) // per_task, True
    return 2**31, True
