"""A limit in time for calls that have none of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

_Value = TypeVar("_Value")


def within(seconds: float, call: Callable[[], _Value], late: Exception) -> _Value:
    """The value of a call, or the exception that it raises; ``late`` if it lasts longer.

    A call that is late goes on in a daemon thread, which does not keep the process alive.
    """
    outcome: Future[_Value] = Future()
    threading.Thread(target=settle, args=(outcome, call), daemon=True).start()
    wait([outcome], timeout=seconds)
    if not outcome.done():
        raise late
    return outcome.result()


def settle(outcome: Future[_Value], call: Callable[[], _Value]) -> None:
    """Call a function on this thread, for whoever waits for its outcome on another."""
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(error)
