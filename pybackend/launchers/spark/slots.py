"""Whether a Spark session can start all workers at once, told before it is asked to."""

from __future__ import annotations

import queue
import re
import threading
import time
from typing import Any

from pybackend.errors import ClusterError

# Executors of a cluster register one after another once the session exists.
_REGISTER_SECONDS = 30.0
_ANSWER_SECONDS = 30.0
# Stands for all slots that Spark may have where it does not tell.
_UNKNOWN = 2**31


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
    slots, fixed = _slots(session)
    deadline = time.monotonic() + _REGISTER_SECONDS
    while slots < workers and not fixed and time.monotonic() < deadline:
        time.sleep(0.5)
        slots, fixed = _slots(session)
    if slots < workers:
        raise ClusterError(
            f"workers={workers}, but this Spark session runs at most {slots} "
            f"task{'s' if slots != 1 else ''} at a time "
            f"(master {_master(session)}): use workers={max(slots, 1)} or fewer, or "
            "start the session with more executors or cores"
        )


def _allocates_dynamically(session: Any) -> bool:
    if _master(session).startswith("local["):
        return False  # Spark ignores the setting there
    return (setting(session, "spark.dynamicAllocation.enabled") or "").lower() == "true"


def _refuse_stopped(session: Any) -> None:
    try:
        if is_connect(session):
            _ask_server(session)
        else:
            _ = session.sparkContext.defaultParallelism
    except Exception as error:
        raise ClusterError(
            f"this Spark session does not answer ({type(error).__name__}): it was stopped, or its "
            "server is gone. Start a new one"
        ) from error


def _ask_server(session: Any) -> None:
    """Have the Connect server answer; its client would try again for minutes where it is gone."""
    answer: queue.Queue[Exception | None] = queue.Queue()

    def ask() -> None:
        try:
            # Not the version, which a session remembers.
            session.conf.get("spark.sql.shuffle.partitions")
            answer.put(None)
        except Exception as error:
            answer.put(error)

    if session.is_stopped:
        raise ConnectionError("the session was stopped")
    threading.Thread(target=ask, daemon=True).start()
    try:
        error = answer.get(timeout=_ANSWER_SECONDS)
    except queue.Empty:
        raise TimeoutError(f"no answer within {_ANSWER_SECONDS:g} s") from None
    if error is not None:
        raise error


def slots_of(session: Any) -> int:
    """Tasks that a session is known to run at once; 1 where Spark does not tell."""
    slots, _ = _slots(session)
    return 1 if slots == _UNKNOWN else slots


def is_connect(session: Any) -> bool:
    """Whether this is a Spark Connect session."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def is_one_machine(session: Any) -> bool:
    """Whether all workers share one machine with Spark's driver: loopback joins them."""
    return _master(session).startswith("local")


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


def _master(session: Any) -> str:
    if is_connect(session):
        return setting(session, "spark.master") or "unknown"
    return str(session.sparkContext.master)


def _slots(session: Any) -> tuple[int, bool]:
    """Tasks that can run at once, and whether that number is final."""
    per_task = int(setting(session, "spark.task.cpus") or 1)
    master = _master(session)
    if cluster := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master):
        return int(cluster[1]) * (int(cluster[2]) // per_task), True
    cores = _cores(session)
    if cores is not None:
        return cores // per_task, master.startswith("local")
    if local := re.fullmatch(r"local\[(\d+)(,.*)?\]", master):
        return int(local[1]) // per_task, True
    return _UNKNOWN, True


def _cores(session: Any) -> int | None:
    """Cores of all executors, None where Spark does not tell.

    In local mode, and in a cluster once its executors have registered, that is Spark's default
    parallelism, unless the user has set it to something else.
    """
    if setting(session, "spark.default.parallelism") is not None:
        return None
    if not is_connect(session):
        return int(session.sparkContext.defaultParallelism)
    if setting(session, "spark.sql.leafNodeDefaultParallelism") is not None:
        return None
    # A range has as many partitions, and its plan says how many: unlike a job that counts them,
    # a plan needs no slot.
    plan = session.sql("EXPLAIN SELECT id FROM range(1)").collect()[0][0]
    splits = re.search(r"splits=(\d+)", plan)
    return int(splits[1]) if splits else None
