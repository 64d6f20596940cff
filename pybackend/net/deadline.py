"""A limit in time for calls that have none of their own."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

_Value = TypeVar("_Value")


def within(seconds: float, call: Callable[[], _Value], late: Exception) -> _Value:
    """The value of a call, or the exception that it raises; ``late`` if it lasts longer.

    A call that is late goes on in a daemon thread, which does not keep the process alive.
    """
    outcome: queue.Queue[tuple[list[_Value], BaseException | None]] = queue.Queue()

    def run() -> None:
        try:
            outcome.put(([call()], None))
        except BaseException as error:
            outcome.put(([], error))

    threading.Thread(target=run, daemon=True).start()
    try:
        value, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise late from None
    if error is not None:
        raise error
    return value[0]
