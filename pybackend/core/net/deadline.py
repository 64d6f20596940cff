"""Time limit for calls that do not have one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

_Value = TypeVar("_Value")


def within(seconds: float, call: Callable[[], _Value], late: Exception) -> _Value:
    """Return the value of a call, or raise its exception; raise ``late`` if it takes longer.

    A late call continues in a daemon thread, which does not keep the process alive.
    """
    outcome: Future[_Value] = Future()
    threading.Thread(target=settle, args=(outcome, call), daemon=True).start()
    wait([outcome], timeout=seconds)
    if not outcome.done():
        raise late
    return outcome.result()


def settle(outcome: Future[_Value], call: Callable[[], _Value]) -> None:
    """Call a function, and set its value or exception as the outcome for another thread."""
    try:
        outcome.set_result(call())
    except BaseException as error:
        outcome.set_exception(error)
