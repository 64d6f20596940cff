"""Keeps a process on a worker's host in touch with the driver, at the other end of two pipes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from pybackend.net.shared_lines import SharedLines

# The system ends a connection on which nobody confirms what was sent: a driver's machine that is
# gone without a word is noticed so, and a driver that was merely stopped is left alone.
_BEAT_SECONDS = 5.0


def follow_driver(
    lines: SharedLines, end: Callable[[], NoReturn], silent_seconds: float = math.inf
) -> threading.Thread:
    """Read what the driver sends, and show it that this process is there, by two threads.

    Parameters
    ----------
    lines
        What is read and written.
    end
        Ends this process; called when the driver is gone.
    silent_seconds
        How long the driver may say nothing.

    Returns
    -------
    threading.Thread
        The one that reads, to be waited for.
    """

    def read() -> NoReturn:
        lines.read()
        end()

    def beat() -> NoReturn:
        while time.monotonic() < lines.heard + silent_seconds:
            time.sleep(_BEAT_SECONDS)
            try:
                lines.beat()
            except OSError:
                break
        end()

    threading.Thread(target=beat, daemon=True).start()
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    return reader
