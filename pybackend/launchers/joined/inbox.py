"""Events of this process's own worker, from the thread that reads them to the one that calls."""

from __future__ import annotations

import queue
from contextlib import suppress

from pybackend.job.messages import Emit, Event, FromLauncher, answer_of


class Inbox:
    """Holds events until the thread that waits for the worker passes them on: R has no other."""

    def __init__(self, on_event: Emit) -> None:
        self._on_event = on_event
        self._events: queue.Queue[Event] = queue.Queue()
        self._orders: queue.Queue[FromLauncher] = queue.Queue()

    def __call__(self, event: Event) -> None:
        """Take in an event, on any thread."""
        self._events.put(event)

    def pass_on(self) -> None:
        """Pass on what has come; answers are for the worker."""
        with suppress(queue.Empty):
            while True:
                if answer := answer_of(self._on_event, self._events.get_nowait()):
                    self._orders.put(answer)

    def poll_order(self) -> FromLauncher | None:
        """The next answer for the worker, if there is one."""
        with suppress(queue.Empty):
            return self._orders.get_nowait()
        return None
