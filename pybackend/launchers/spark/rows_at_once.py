"""Number of rows that Spark passes to a task at once: a session setting that calls share."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

from pybackend.errors import ClusterError
from pybackend.launchers.spark.session import ask, is_connect
from pybackend.net.deadline import within

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
    """Reduce the rows that Spark passes to a task at once: 10,000 wide rows need much memory.

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
