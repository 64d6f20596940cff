"""Connection of a process on a worker's host to the driver, over two pipes."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from pybackend.net.shared_lines import SharedLines

# The system closes a connection whose data is not acknowledged: this detects a driver's machine
# that crashed, but not a driver that was only stopped.
_BEAT_SECONDS = 5.0


def follow_driver(
    lines: SharedLines, end: Callable[[], NoReturn], silent_seconds: float = math.inf
) -> threading.Thread:
    """Read from the driver, and send it heartbeats, by two threads.

    Parameters
    ----------
    lines
        Connection to the driver.
    end
        Ends this process; called when the connection to the driver is lost.
    silent_seconds
        Time limit for silence of the driver.

    Returns
    -------
    threading.Thread
        The thread that reads, which can be joined.
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
