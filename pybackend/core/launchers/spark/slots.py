"""Spark's slots: their number, the resources of each, and the queue of waiting training runs.

Only training runs that may run concurrently take turns, such as the fits of a `CrossValidator`.
Spark would queue them itself, but neither the network check nor a shuffle can start without a slot,
and a job without a running task counts as stuck after a minute.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.arguments import counted
from pybackend.core.job.worker_options import Resources
from pybackend.core.launchers.shares import find_shortage, this_machine
from pybackend.core.launchers.spark import sessions
from pybackend.core.machine.capacity import count_cores
from pybackend.core.words import call_of, setting

# Executors of a cluster register one after another once the session exists.
_REGISTER_SECONDS = 30.0
# Number of slots if Spark does not report it.
_UNKNOWN = 2**31


def check_slots(session: Any, workers: int, resources: Resources | None = None) -> int:
    """Return the number of tasks that the session can run at once.

    ``resources`` are those of each task. None (default): those of the tasks of the session, as for
    smaller ones. `ClusterError` if the session was stopped, has too few slots, or uses dynamic
    allocation; it names what to change.
    """
    # Without these checks, Spark would wait ten minutes and then fail.
    _refuse_stopped(session)
    master = sessions.read_master(session)
    is_local = master.startswith("local[")  # where Spark ignores the setting
    is_dynamic = sessions.read_setting(session, "spark.dynamicAllocation.enabled") or ""
    if is_dynamic.lower() == "true" and not is_local:
        raise ClusterError(
            "dynamic allocation is enabled, but Spark's barrier mode does not work with it: start "
            "the session with spark.dynamicAllocation.enabled=false and spark.executor.instances "
            "set"
        )
    slots, fixed = _count_available(session, resources)
    deadline = time.monotonic() + _REGISTER_SECONDS
    while slots < workers and not fixed and time.monotonic() < deadline:
        time.sleep(0.5)
        slots, fixed = _count_available(session, resources)
    if slots < workers:
        use = f"use at most {slots}" if slots else "request fewer of them in `resources`"
        raise ClusterError(
            f"`workers` is {workers}, but this Spark session runs at most "
            f"{counted(slots, 'task')}{_with_resources(resources)} at a time (master {master}): "
            f"{use}, or start the session with more executors or cores"
        )
    return slots


def _refuse_stopped(session: Any) -> None:
    try:
        if sessions.is_connect(session):
            if session.is_stopped:
                raise ConnectionError("the session was stopped")
            # Not the version, which a session remembers.
            read = partial(session.conf.get, "spark.sql.shuffle.partitions")
            sessions.ask(session, "a setting", read)
        else:
            sessions.ask(session, "its slots", lambda: session.sparkContext.defaultParallelism)
    except ClusterError:
        raise
    except Exception as error:
        raise ClusterError(
            f"this Spark session does not answer ({type(error).__name__}): it was stopped, or its "
            "server exited. Start a new one"
        ) from None


def count_slots(session: Any) -> int:
    """Return the number of tasks that a session can run at once; 1 if Spark does not report it."""
    slots, _ = _count_available(session)
    return 1 if slots == _UNKNOWN else slots


def choose_lanes(slots: int, workers: int, most: int, parallelism: int | None) -> int:
    """Return how many jobs with this number of workers to run at once in a session's slots.

    `ClusterError` if there are too few slots.
    """
    if parallelism is None:
        return 1 if slots == _UNKNOWN else max(1, min(most, slots // workers))
    lanes = min(most, parallelism)
    if lanes * workers > slots:
        raise ClusterError(
            f"`parallelism` is {parallelism}, but this Spark session runs at most "
            f"{counted(slots, 'task')} at a time, and each trial needs {workers}: use at most "
            f"{max(1, slots // workers)}, or start the session with more executors or cores"
        )
    return lanes


def _with_resources(resources: Resources | None) -> str:
    wanted = resources or Resources()
    amounts = {"core": wanted.cpus, "GPU": wanted.gpus}
    parts = [counted(number, name) for name, number in amounts.items() if number]
    return f" with {' and '.join(parts)} each" if parts else ""


def _count_available(session: Any, resources: Resources | None = None) -> tuple[int, bool]:
    """Return the number of tasks that can run at once, and whether it is final."""
    wanted = resources or Resources()
    per_task = max(_cores_per_task(session), wanted.cpus or 0)

    def tasks_of(executor_cores: int) -> int:
        gpus = sessions.read_setting(session, _GPUS_OF_EXECUTOR)
        most = int(float(gpus) // wanted.gpus) if gpus and wanted.gpus else executor_cores
        return min(executor_cores // per_task, most)

    master = sessions.read_master(session)
    if cluster := re.fullmatch(r"local-cluster\[\s*(\d+)\s*,\s*(\d+)\s*,.*\]", master):
        return int(cluster[1]) * tasks_of(int(cluster[2])), True
    if (cores := _count_cores(session)) is not None:
        # All resources of a task belong to one executor. Unless this is set, its cores are unknown.
        each = int(sessions.read_setting(session, "spark.executor.cores") or 0)
        tasks = cores // each * tasks_of(each) if each else cores // per_task
        return tasks, master.startswith("local")
    if local := re.fullmatch(r"local\[(\d+)(,.*)?\]", master):
        return int(local[1]) // per_task, True
    return _UNKNOWN, True


def _count_cores(session: Any) -> int | None:
    """Return the cores of all executors; None if Spark does not report them.

    In local mode, and in a cluster after its executors have registered, this is Spark's default
    parallelism, unless the user has set that value.
    """
    if sessions.read_setting(session, "spark.default.parallelism") is not None:
        return None
    if not sessions.is_connect(session):
        context = session.sparkContext
        return sessions.ask(session, "its slots", lambda: int(context.defaultParallelism))
    if sessions.read_setting(session, "spark.sql.leafNodeDefaultParallelism") is not None:
        return None
    # A range has that number of partitions, and its plan shows it. Unlike a job, a plan needs no
    # slot.
    explain = "EXPLAIN SELECT id FROM range(1)"
    plan = sessions.ask(session, "a plan", lambda: session.sql(explain).collect()[0][0])
    splits = re.search(r"splits=(\d+)", plan)
    return int(splits[1]) if splits else None


_CPUS = "spark.task.cpus"
_GPUS = "spark.task.resource.gpu.amount"
_GPUS_OF_EXECUTOR = "spark.executor.resource.gpu.amount"
# Profiles of stages that run Python functions on a DataFrame.
_PROFILES_SINCE = (4, 0)


def _cores_per_task(session: Any) -> int:
    return int(sessions.read_setting(session, _CPUS) or 1)


def make_profile(session: Any, resources: Resources, workers: int) -> Any:
    """Return the ``ResourceProfile`` of a stage of workers; None: the session's tasks have enough.

    A profile needs no other session: its tasks get more cores and GPUs of the executors that run.
    If these lack the resources, the `InputError` names the setting that must be set when the
    session starts.
    """
    _check_memory(session, resources, workers)
    if not (lacking := _lacking(session, resources)):
        return None
    # Tasks of a stage can have other resources than those of the session, except in local mode.
    has_profiles = re.match(r"local-cluster|spark:|yarn|k8s:", sessions.read_master(session))
    if sessions.read_version(session) < _PROFILES_SINCE or not has_profiles:
        raise InputError(lacking)
    has_gpus = float(sessions.read_setting(session, _GPUS_OF_EXECUTOR) or 0)
    if resources.gpus and resources.gpus > has_gpus:
        has = f"an executor of this Spark session has {has_gpus:g}"
        raise InputError(_explain_lack("gpus", resources.gpus, has, _GPUS_OF_EXECUTOR))
    cpus = max(_cores_per_task(session), resources.cpus or 0)
    gpus = resources.gpus or float(sessions.read_setting(session, _GPUS) or 0)
    # By the cores and GPUs of a task.
    known: dict[tuple[int, float], Any] = vars(session).setdefault("tfdist_profiles", {})
    if (cpus, gpus) in known:
        return known[cpus, gpus]
    from pyspark.resource import ResourceProfileBuilder, TaskResourceRequests

    wanted = TaskResourceRequests().cpus(cpus)
    if gpus:
        wanted = wanted.resource("gpu", gpus)
    profile = ResourceProfileBuilder().require(wanted).build
    if sessions.is_connect(session):
        # The profile registers when its number is read, which not every thread can do.
        _ = profile.id
    known[cpus, gpus] = profile
    return profile


def check_allotment(session: Any, resources: Resources, workers: int) -> None:
    """Raise `InputError` if workers need more resources than tasks of the session have.

    It names the setting that must be set when the session starts.
    """
    _check_memory(session, resources, workers)
    if lacking := _lacking(session, resources):
        raise InputError(lacking)


def _lacking(session: Any, resources: Resources) -> str:
    """Return what tasks of the session lack, and the setting for it; empty if they have enough."""
    pairs = {_CPUS: ("cpus", resources.cpus, "1"), _GPUS: ("gpus", resources.gpus, "0")}
    for key, (name, wanted, default) in pairs.items():
        has = float(sessions.read_setting(session, key) or default)
        if wanted is not None and wanted > has:
            return _explain_lack(name, wanted, f"a task of this Spark session has {has:g}", key)
    return ""


def _explain_lack(name: str, wanted: int, has: str, key: str) -> str:
    request = setting(resources=call_of("Resources", **{name: wanted}))
    return (
        f"each worker needs {wanted} {name} ({request}), but {has}: start the session with "
        f"{key}={wanted}"
    )


def _check_memory(session: Any, resources: Resources, workers: int) -> None:
    if sessions.is_one_machine(session) and not sessions.is_connect(session):
        # In a cluster, each task checks its own machine.
        wanted_there = Resources(memory=resources.memory)
        if shortage := find_shortage(wanted_there, workers, this_machine()):
            raise InputError(shortage)


def cores_of_task(session: Any, workers: int, cpus: int | None = None) -> int:
    """Return the number of cores for each worker: a task's, or a share of a local session's."""
    given = sessions.read_setting(session, _CPUS)
    # In a cluster other tasks, and other applications, may use the rest of a machine.
    if given is not None or not sessions.is_one_machine(session):
        return max(int(given or 1), cpus or 0)
    cores = count_slots(session)
    if not sessions.is_connect(session):  # it may have more slots than cores
        cores = min(cores, count_cores())
    return max(1, cores // workers, cpus or 0)


# Time of a wait before it is reported.
_QUIET_SECONDS = 10.0


@dataclass(eq=False)
class _Turn:
    """Call that holds slots, or is waiting for them."""

    workers: int
    began: float = field(default_factory=time.monotonic)
    holds: bool = False


_changed = threading.Condition()
# By the id of their owner, which outlives its turns; in the order of arrival.
_turns: dict[int, list[_Turn]] = {}


@contextmanager
def take_slots(
    owner: object, workers: int, slots: int, on_wait: Callable[[str], object]
) -> Iterator[None]:
    """Wait for some of a session's slots, and hold them during the block; first come, first served.

    ``owner`` is the SparkContext or Connect session that has the slots, at least as many as
    ``workers``; each has a separate queue. If the wait is long, ``on_wait`` is called once with a
    description of what holds the slots.
    """
    key, turn = id(owner), _Turn(workers)

    def is_next() -> bool:
        ahead = _turns[key][: _turns[key].index(turn)]
        return all(one.holds for one in ahead) and (
            sum(one.workers for one in ahead) + workers <= slots
        )

    def wait_for_turn(seconds: float | None) -> str:
        """Return an empty string if this call now holds its slots, else what holds them."""
        with _changed:
            turn.holds = _changed.wait_for(is_next, seconds)
            return "" if turn.holds else _describe(_turns[key], turn, slots)

    with _changed:
        _turns.setdefault(key, []).append(turn)
    try:
        if reason := wait_for_turn(_QUIET_SECONDS):
            on_wait(reason)
            wait_for_turn(None)
        yield
    finally:  # also on Ctrl-C
        with _changed:
            _turns[key].remove(turn)
            if not _turns[key]:
                del _turns[key]
            _changed.notify_all()


def _describe(turns: list[_Turn], turn: _Turn, slots: int) -> str:
    now, ahead = time.monotonic(), turns[: turns.index(turn)]
    held = [f"{setting(workers=t.workers)} for {now - t.began:.0f} s" for t in ahead if t.holds]
    queued = sum(not t.holds for t in ahead)
    others = f", with {queued} ahead of it in the queue" if queued else ""
    return (
        f"a training run is waiting for {turn.workers} of the session's {slots} slots: other "
        f"training runs of this process occupy them ({', '.join(held)}){others}"
    )
