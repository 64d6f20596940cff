"""Signals to the driver of `tfdist run`, read like messages."""

from __future__ import annotations

import contextlib
import os
import signal
from types import TracebackType
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM)
_FORWARDED = (*ENDING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class CaughtSignals:
    """While this context lasts, the signals that are forwarded wait here, instead of acting.

    What was ignored before (by nohup, or a shell's background job) stays ignored.
    """

    def __enter__(self) -> CaughtSignals:
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(self._writing)
        self._handlers: dict[signal.Signals, Any] = {
            number: signal.signal(number, lambda *_: None)
            for number in _FORWARDED
            if signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._reading)
        os.close(self._writing)

    def fileno(self) -> int:
        """The descriptor that becomes readable when a signal has come."""
        return self._reading

    def take(self) -> list[signal.Signals]:
        """The signals that have come since the last call."""
        with contextlib.suppress(BlockingIOError):
            return [signal.Signals(number) for number in os.read(self._reading, 4096)]
        return []
