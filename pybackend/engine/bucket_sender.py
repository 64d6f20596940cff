"""Thread that sends the buckets of a step while later ones are still being computed."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import numpy.typing as npt

Array = npt.NDArray[Any]


class BucketSender:
    """Thread that sends the buckets of a step in their order, as soon as each is ready."""

    def __init__(self, buckets: int, send: Callable[[Array, int], None]) -> None:
        self._buckets = buckets
        self._send = send
        self._lock = threading.Lock()
        self._flat: Array | None = None
        self._ready: queue.Queue[int | None] = queue.Queue()
        self._done: queue.Queue[BaseException | None] = queue.Queue()
        threading.Thread(target=self._run, name="tfdist-exchange", daemon=True).start()

    def buffer(self, make: Callable[[], Array]) -> Array:
        """Return the buffer of this step; the first caller creates it."""
        with self._lock:
            if self._flat is None:
                self._flat = make()
            return self._flat

    def mark_ready(self, bucket: int) -> None:
        """Mark a bucket as filled; buckets may become ready in any order."""
        self._ready.put(bucket)

    def finish(self) -> Array:
        """Wait for the last bucket; the caller then owns the buffer.

        Raises
        ------
        TfdistError
            Sending failed on the thread.
        """
        error = self._done.get()
        if error is not None:
            raise error
        flat, self._flat = self._flat, None
        assert flat is not None
        return flat

    def close(self) -> None:
        """End the thread when it has sent what is ready."""
        self._ready.put(None)

    def _run(self) -> None:
        waiting: set[int] = set()
        due = 0
        while (bucket := self._ready.get()) is not None:
            waiting.add(bucket)
            try:
                # In the same order on all workers, although they become ready in any order.
                while due in waiting:
                    waiting.remove(due)
                    assert self._flat is not None
                    self._send(self._flat, due)
                    due += 1
            except BaseException as error:
                self._done.put(error)
                return
            if due == self._buckets:
                due = 0
                self._done.put(None)
