"""Named queues and values for the threads of one process."""

from __future__ import annotations

import hmac
import queue
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from pybackend.core.errors import InputError
from pybackend.tfos import marker
from pybackend.tfos.feed.server import RowQueue, Taken

# Managers of this process by address, each with its key.
_STARTED: dict[str, tuple[bytes, TFManager]] = {}


class ItemQueue(queue.Queue[Any]):
    """Queue that ends with None, and from which several items can be taken at once."""

    def take(self, count: int, *, keeps_apart: bool = False) -> Taken:
        """Return the next items, and whether they are the last, as `RowQueue.take` does."""
        items: list[Any] = []
        while len(items) < count:
            item = self.get()
            self.task_done()
            if item is None:
                return items, True
            if not isinstance(item, marker.EndPartition):
                items.append(item)
            elif keeps_apart and items:
                break
        return items, False

    def take_columns(self, count: int, width: int, *, keeps_apart: bool = False) -> Taken:
        items, has_ended = self.take(count, keeps_apart=keeps_apart)
        return [[item[n] for item in items] for n in range(width)], has_ended

    def give(self, results: Sequence[Any]) -> None:
        for result in results:
            self.put(result)

    def stop(self) -> None:
        with suppress(queue.Empty):
            while True:
                self.get_nowait()
                self.task_done()


class TFManager:
    """Named queues and values. ``address`` is for `connect` in this process."""

    def __init__(self, queues: dict[str, Any]) -> None:
        self.address = f"tfdist-{secrets.token_hex(8)}"
        self._queues = queues
        self._values: dict[str, Any] = {}

    def get_queue(self, name: str) -> Any:
        """Return the queue with a name; None if it does not exist."""
        return self._queues.get(name)

    def get(self, key: str) -> Any:
        """Return a value; `KeyError` if it was not set."""
        return self._values[key]

    def set(self, key: str, value: Any) -> None:
        self._values[key] = value

    def shutdown(self) -> None:
        """Remove this manager, so that `connect` no longer finds it."""
        _STARTED.pop(self.address, None)


def start(authkey: bytes, queues: Sequence[str], mode: str = "local") -> TFManager:
    if mode not in ("local", "remote"):
        raise InputError(f"`mode` must be 'local' or 'remote', not {mode!r}")
    manager = TFManager({name: ItemQueue() for name in queues})
    _STARTED[manager.address] = bytes(authkey), manager
    return manager


def connect(address: str, authkey: bytes) -> TFManager:
    """Return the manager that this process started at an address.

    Raises `InputError` if there is none, or it has a different key. Managers of other processes
    cannot be reached: `TFCluster.train` and `TFCluster.inference` pass rows and results between
    processes.
    """
    key, manager = _STARTED.get(address, (b"", None))
    if manager is None or not hmac.compare_digest(key, bytes(authkey)):
        raise InputError(
            f"this process did not start a manager at {address!r} with that key: use "
            "TFCluster.train() and TFCluster.inference() to pass rows between processes"
        )
    return manager


def fed_manager(rows: RowQueue | None) -> TFManager:
    """Return the manager of a worker, whose queues ``input`` and ``output`` Spark feeds."""
    queues: dict[str, Any] = {name: ItemQueue() for name in ("input", "output", "error", "control")}
    if rows is not None:
        queues["input"] = queues["output"] = rows
    manager = TFManager(queues)
    manager.set("state", "running")
    return manager
