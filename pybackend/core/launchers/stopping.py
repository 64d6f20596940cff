"""Stop a launcher that runs on another thread, as Ctrl-C stops one on the main thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_EVENT: ContextVar[threading.Event | None] = ContextVar("_EVENT", default=None)


class StopRequestedError(BaseException):
    """Another thread stopped the workers of this one, as Ctrl-C does."""


@contextmanager
def stopped_by(event: threading.Event) -> Iterator[None]:
    """Have launchers in this context stop their workers once the event is set."""
    token = _EVENT.set(event)
    try:
        yield
    finally:
        _EVENT.reset(token)


def check_stop() -> None:
    """Raise `StopRequestedError` if another thread stopped this one; launchers call it often."""
    event = _EVENT.get()
    if event is not None and event.is_set():
        raise StopRequestedError
