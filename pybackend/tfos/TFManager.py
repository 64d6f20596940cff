"""Queues and values by name, for the threads of one process."""

from __future__ import annotations

import hmac
import queue
import secrets
from collections.abc import Sequence
from typing import Any

from pybackend.errors import InputError
from pybackend.feed.queue import RowQueue
from pybackend.tfos import marker

# Managers of this process by their addresses, each with its key.
_STARTED: dict[str, tuple[bytes, TFManager]] = {}


class ItemQueue(queue.Queue[Any]):
    """A queue that ends with None, and from which several items are taken at once."""

    def take(self, count: int, *, keeps_apart: bool = False) -> tuple[list[Any], bool]:
        """The next items, and whether the end has come; see `RowQueue.take`."""
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

    def take_columns(
        self, count: int, width: int, *, keeps_apart: bool = False
    ) -> tuple[list[Any], bool]:
        """The next items as lists of their first values; see `RowQueue.take_columns`."""
        items, has_ended = self.take(count, keeps_apart=keeps_apart)
        return [[item[n] for item in items] for n in range(width)], has_ended

    def give(self, results: Sequence[Any]) -> None:
        """Put several results."""
        for result in results:
            self.put(result)

    def stop(self) -> None:
        """Drop all items."""
        while True:
            try:
                self.get_nowait()
                self.task_done()
            except queue.Empty:
                return


class FedQueue:
    """The rows that Spark feeds a worker, or the results for them, under the names of a queue."""

    def __init__(self, rows: RowQueue) -> None:
        self._rows = rows
        self.take = rows.take
        self.take_columns = rows.take_columns
        self.give = rows.give
        self.stop = rows.stop

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """The next item, None at the end."""
        items, _ = self.take(1)
        return items[0] if items else None

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        """Give one result."""
        self.give([item])

    def task_done(self) -> None:
        """Nothing: an item counts as done when it is taken."""


class TFManager:
    """Queues, which `start` names, and values that are set.

    Attributes
    ----------
    address
        By which `connect` finds it in this process.
    """

    def __init__(self, queues: dict[str, Any]) -> None:
        self.address = f"tfdist-{secrets.token_hex(8)}"
        self._queues = queues
        self._values: dict[str, Any] = {}

    def get_queue(self, name: str) -> Any:
        """The queue of a name, None if there is none."""
        return self._queues.get(name)

    def get(self, key: str) -> Any:
        """A value that was set; `KeyError` if it was not."""
        return self._values[key]

    def set(self, key: str, value: Any) -> None:
        """Set a value."""
        self._values[key] = value

    def shutdown(self) -> None:
        """Have `connect` find it no longer."""
        _STARTED.pop(self.address, None)


def start(authkey: bytes, queues: Sequence[str], mode: str = "local") -> TFManager:
    """Make a manager with these queues."""
    if mode not in ("local", "remote"):
        raise InputError(f"`mode` must be 'local' or 'remote', not {mode!r}")
    manager = TFManager({name: ItemQueue() for name in queues})
    _STARTED[manager.address] = bytes(authkey), manager
    return manager


def connect(address: str, authkey: bytes) -> TFManager:
    """The manager that this process has started at an address.

    Raises
    ------
    InputError
        There is none, or it has another key. Managers of other processes are not reached: rows and
        results pass between processes by `TFCluster.train` and `TFCluster.inference`.
    """
    key, manager = _STARTED.get(address, (b"", None))
    if manager is None or not hmac.compare_digest(key, bytes(authkey)):
        raise InputError(
            f"this process has started no manager at {address!r} with that key: processes pass "
            "each other rows by TFCluster.train() and TFCluster.inference()"
        )
    return manager


def fed_manager(rows: RowQueue | None) -> TFManager:
    """The manager of a worker: its queues ``input`` and ``output`` are those that Spark feeds."""
    queues: dict[str, Any] = {name: ItemQueue() for name in ("input", "output", "error", "control")}
    if rows is not None:
        queues["input"] = queues["output"] = FedQueue(rows)
    manager = TFManager(queues)
    manager.set("state", "running")
    return manager
