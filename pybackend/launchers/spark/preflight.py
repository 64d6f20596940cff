"""Checks before Spark moves rows: the network, and how many rows it hands over at a time.

Spark's own transfers wait minutes for a host behind a firewall, before any Python code runs in a
task. The network check's stage does not move any data, and takes a fraction of a second if the
network works.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from pybackend.errors import ClusterError
from pybackend.launchers.spark.explain import run_explained
from pybackend.launchers.spark.jobs import give_up_after
from pybackend.launchers.spark.session import ask, is_connect
from pybackend.net.deadline import within
from pybackend.net.dialing import advise_on_network, find_unreachable

SCHEMA = "rank int, problem string"
# Spark itself may wait for a peer to pass on the task's code: then this stage does not end.
LIMIT_SECONDS = 90.0
TOO_LONG = (
    f"Spark's executors did not report within {LIMIT_SECONDS:g} s whether they can reach each "
    "other: either they cannot, or their hosts are overloaded. "
)
# Number of other hosts that each host tries: enough to find hosts behind a firewall in one round.
_MOST = 64


def check_network(session: Any, workers: int) -> None:
    """Raise an error if the hosts of a job's tasks cannot all reach each other.

    Raises
    ------
    ClusterError
        Raised after about ten seconds; names the two hosts, the address and what to do.
    """

    def make() -> Any:
        return session.range(0, workers, 1, workers).mapInArrow(look, SCHEMA, barrier=True)

    plan = ask(session, "a plan", make)
    late = ClusterError(TOO_LONG + advise_on_network())
    rows = run_explained(session, plan.collect, check=give_up_after(LIMIT_SECONDS, late))
    problems = [row["problem"] for row in sorted(rows, key=lambda row: row["rank"])]
    if problems:
        more = f" ({len(problems)} of {workers} workers cannot reach another)"
        raise ClusterError(problems[0] + more)


def look(batches: Iterator[Any]) -> Iterator[Any]:
    """Yield a row of `SCHEMA` if another task's host is unreachable; runs in each task.

    Executors are identified by the port of their connection to the driver. Usually no process
    listens there, and a refused connection shows that the network lets connections through.
    """
    import pyarrow as pa
    from pyspark import BarrierTaskContext

    # Otherwise Spark ends this Python process and starts another, which costs the workers' tasks
    # seconds (test_the_check_of_the_network_leaves_its_pythons_to_the_next_tasks).
    for _ in batches:
        pass
    context = BarrierTaskContext.get()
    rank = context.partitionId()
    peers = [str(info.address) for info in context.getTaskInfos()]
    others = [(rank + step) % len(peers) for step in range(1, min(len(peers), _MOST + 1))]
    problem = find_unreachable(peers, rank, others)
    if problem:
        yield pa.RecordBatch.from_arrays(
            [pa.array([rank], pa.int32()), pa.array([problem])], names=["rank", "problem"]
        )


_RECORDS = "spark.sql.execution.arrow.maxRecordsPerBatch"
# Stored in the session, since several Python objects may represent it: the previous value, and the
# number of calls that need the change.
_USE = "spark.tfdist.rowsAtOnce"
_ROWS_AT_ONCE = 2000
_RESTORE_SECONDS = 10.0
_locks: WeakKeyDictionary[Any, threading.Lock] = WeakKeyDictionary()
_locks_lock = threading.Lock()


@contextmanager
def small_batches(session: Any) -> Iterator[None]:
    """Reduce how many rows Spark passes to a task at a time: 10,000 wide rows need a lot of memory.

    The first of several calls changes the setting, and the last one restores it.
    """
    lock = _lock_of(session)
    with lock:
        ask(session, "a change of settings", lambda: _lower(session.conf))
    try:
        yield
    finally:
        with lock, suppress(Exception):  # a stopped session needs no settings
            within(_RESTORE_SECONDS, lambda: _restore(session.conf), ClusterError())


def _lock_of(session: Any) -> threading.Lock:
    """Return the lock that all calls of a context, or of a Connect session, share."""
    owner = session if is_connect(session) else session.sparkContext
    with _locks_lock:
        return _locks.setdefault(owner, threading.Lock())


def _lower(conf: Any) -> None:
    use = conf.get(_USE, None)
    before, users = json.loads(use) if use else (conf.get(_RECORDS, None), 0)
    conf.set(_USE, json.dumps([before, users + 1]))
    if not users:
        known = int(before or 0)  # 0 or less: no limit
        conf.set(_RECORDS, str(min(known, _ROWS_AT_ONCE) if known > 0 else _ROWS_AT_ONCE))


def _restore(conf: Any) -> None:
    before, users = json.loads(conf.get(_USE))
    if users > 1:
        conf.set(_USE, json.dumps([before, users - 1]))
        return
    if before is None:
        conf.unset(_RECORDS)
    else:
        conf.set(_RECORDS, before)
    conf.unset(_USE)
