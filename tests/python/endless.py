"""Calls whose workers do not end by themselves, and ways to end them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from conftest import wait_for

from pybackend import WorkerFailedError

PATIENCE = 90.0


class EndlessCall(threading.Thread):
    """A call whose workers are running, and the error that ends it."""

    def __init__(self, call: Callable[[], Any], has_begun: Callable[[], bool]) -> None:
        super().__init__(daemon=True)
        self._call = call
        self._error: BaseException | None = None
        self.start()
        wait_for(lambda: has_begun() or self._error, PATIENCE)

    def run(self) -> None:
        try:
            self._call()
        except BaseException as error:
            self._error = error

    def failure(self) -> WorkerFailedError:
        self.join(PATIENCE)
        assert isinstance(self._error, WorkerFailedError), repr(self._error)
        return self._error


@contextmanager
def endless_driver(
    program: str, *arguments: str, has_begun: Callable[[], bool]
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process that makes such a call."""
    command = [sys.executable, "-c", program, *arguments]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL, start_new_session=True) as driver:
        try:
            wait_for(lambda: has_begun() or driver.poll() is not None, PATIENCE)
            yield driver
        finally:
            driver.kill()
