"""Check in advance whether a Spark session can start all workers at once."""

from __future__ import annotations

import re
import time
from typing import Any

from pybackend.errors import ClusterError
from pybackend.job.arguments import counted
from pybackend.launchers.spark.session import ask, is_connect

# Executors of a cluster register one after another once the session exists.
_REGISTER_SECONDS = 30.0
# Number of slots if Spark does not report it.
_UNKNOWN = 2**31


def check_slots(session: Any, workers: int) -> int:
    """Return the number of tasks that the session runs at once.

    Without this check, Spark would wait ten minutes and then fail.

    Raises
    ------
    ClusterError
        The session was stopped, has too few slots, or uses dynamic allocation; names what
        to change.
    """
    _refuse_stopped(session)
    if _allocates_dynamically(session):
        raise ClusterError(
            "dynamic allocation is on, and Spark's barrier mode does not work with it: start the "
            "session with spark.dynamicAllocation.enabled=false and spark.executor.instances set"
        )
    slots, fixed = _count_available(session)
    deadline = time.monotonic() + _REGISTER_SECONDS
    while slots < workers and not fixed and time.monotonic() < deadline:
        time.sleep(0.5)
        slots, fixed = _count_available(session)
    if slots < workers:
        raise ClusterError(
            f"`workers` is {workers}, but this Spark session runs at most "
            f"{counted(slots, 'task')} at a time (master {_master(session)}): use at most "
            f"{max(slots, 1)}, or start the session with more executors or cores"
        )
    return slots


def _allocates_dynamically(session: Any) -> bool:
    if _master(session).startswith("local["):
        return False  # Spark ignores the setting there
    return (read_setting(session, "spark.dynamicAllocation.enabled") or "").lower() == "true"


def _refuse_stopped(session: Any) -> None:
    try:
        if is_connect(session):
            if session.is_stopped:
                raise ConnectionError("the session was stopped")
            # Not the version, which a session remembers.
            ask(session, "a setting", lambda: session.conf.get("spark.sql.shuffle.partitions"))
        else:
            ask(session, "its slots", lambda: session.sparkContext.defaultParallelism)
    except ClusterError:
        raise
    except Exception as error:
        raise ClusterError(
            f"this Spark session does not answer ({type(error).__name__}): it was stopped, or its "
            "server exited. Start a new one"
        ) from None


def count_slots(session: Any) -> int:
    """Return the number of tasks that a session runs at once; 1 if Spark does not report it."""
    slots, _ = _count_available(session)
    return 1 if slots == _UNKNOWN else slots


def is_one_machine(session: Any) -> bool:
    """Return whether all workers run on the machine of Spark's driver, and loopback suffices."""
    return _master(session).startswith("local")


def read_setting(session: Any, name: str) -> str | None:
    """Return a setting of the session or its context; None if unset or hidden."""
    if is_connect(session):
        return ask(session, f"the setting {name}", lambda: _shown_setting(session, name))
    return _context_settings(session).get(name)


def _shown_setting(session: Any, name: str) -> str | None:
    try:
        value = session.conf.get(name, None)
    except Exception:  # Connect does not show all settings
        return None
    return None if value is None else str(value)


def _context_settings(session: Any) -> dict[str, str]:
    """Return the settings of a SparkContext, cached: they are fixed, and reading takes 30 ms."""
    known: dict[str, dict[str, str]] = vars(session.sparkContext)
    if "tfdist_settings" not in known:
        pairs = ask(session, "its settings", lambda: session.sparkContext.getConf().getAll())
        known["tfdist_settings"] = dict(pairs)
    return known["tfdist_settings"]


def _master(session: Any) -> str:
    if is_connect(session):
        return read_setting(session, "spark.master") or "unknown"
    return str(session.sparkContext.master)


def _count_available(session: Any) -> tuple[int, bool]:
    """Return the number of tasks that can run at once, and whether it is final."""
    per_task = int(read_setting(session, "spark.task.cpus") or 1)
    master = _master(session)
    if cluster := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master):
        return int(cluster[1]) * (int(cluster[2]) // per_task), True
    cores = _count_cores(session)
    if cores is not None:
        return cores // per_task, master.startswith("local")
    if local := re.fullmatch(r"local\[(\d+)(,.*)?\]", master):
        return int(local[1]) // per_task, True
    return _UNKNOWN, True


def _count_cores(session: Any) -> int | None:
    """Return the cores of all executors; None if Spark does not report them.

    In local mode, and in a cluster after its executors have registered, this is Spark's default
    parallelism, unless the user has set that.
    """
    if read_setting(session, "spark.default.parallelism") is not None:
        return None
    if not is_connect(session):
        return ask(session, "its slots", lambda: int(session.sparkContext.defaultParallelism))
    if read_setting(session, "spark.sql.leafNodeDefaultParallelism") is not None:
        return None
    # A range has that number of partitions, and its plan shows it. Unlike a job, a plan needs no
    # slot.
    explain = "EXPLAIN SELECT id FROM range(1)"
    plan = ask(session, "a plan", lambda: session.sql(explain).collect()[0][0])
    splits = re.search(r"splits=(\d+)", plan)
    return int(splits[1]) if splits else None
