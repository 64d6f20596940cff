"""Threads of a test, whose waits have a limit: then the test fails, and shows what still runs."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from types import TracebackType
from typing import Any

LIMIT = 120.0


class Threads:
    """Runs functions at the same time, each on a daemon thread.

    An executor of the standard library waits for its threads without a limit, also when a test has
    reached its own: a rank whose peer was lost without a word then held up the whole run.
    """

    def __init__(self, seconds: float = LIMIT) -> None:
        self._seconds = seconds
        self._running: dict[_Outcome, threading.Thread] = {}

    def submit(self, work: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        """Start a function."""
        outcome = _Outcome(self._seconds)
        thread = threading.Thread(
            target=_run, args=(outcome, work, arguments, options), name=repr(work), daemon=True
        )
        self._running[outcome] = outcome.thread = thread
        thread.start()
        return outcome

    def map(self, work: Callable[..., Any], *values: Iterable[Any]) -> list[Any]:
        """Call a function with each value; return the results, or raise the first error."""
        return [one.result() for one in [self.submit(work, *v) for v in zip(*values, strict=False)]]

    def __enter__(self) -> Threads:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:  # which says more than that a thread still waits
            return
        for outcome in self._running:
            outcome.exception()


class _Outcome(Future[Any]):
    """A result that is waited for with a limit."""

    thread: threading.Thread

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def result(self, timeout: float | None = None) -> Any:
        self._wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        seconds = self._seconds if timeout is None else timeout
        self.thread.join(seconds)
        if not self.done():
            raise TimeoutError(f"still runs after {seconds:g} s:\n{stack_of(self.thread)}")


def stack_of(thread: threading.Thread) -> str:
    """Return a thread's name and what it is doing."""
    frame = sys._current_frames().get(thread.ident or 0)
    return f"{thread.name}\n{''.join(traceback.format_stack(frame)) if frame else ''}"


def _run(outcome: _Outcome, work: Any, arguments: Any, options: Any) -> None:
    try:
        outcome.set_result(work(*arguments, **options))
    except BaseException as error:
        outcome.set_exception(error)
