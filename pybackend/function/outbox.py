"""What goes out on one connection, whole and in order, without keeping whoever sends it waiting."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from pybackend.net.stream import Stream, wait_any


class Outbox:
    """Sends lines from a thread of its own; a connection that fails is closed.

    Parameters
    ----------
    stream
        The connection.
    timeout
        Seconds after which the other machine is lost if it has answered nothing. A process that
        only does not read has all the time that it needs.
    on_loss
        Called from the thread with why the other end is lost, before the connection is closed.
    """

    def __init__(self, stream: Stream, timeout: float, on_loss: Callable[[str], object]) -> None:
        self._stream = stream
        self._timeout = timeout
        self._on_loss = on_loss
        self._lines: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def put(self, line: bytes) -> None:
        """Send a line after those before it."""
        self._lines.put(line)

    def finish(self, seconds: float | None = None) -> None:
        """Wait until all has been sent, or cannot be."""
        self._lines.put(None)
        self._thread.join(seconds)

    def _work(self) -> None:
        try:
            while (line := self._lines.get()) is not None:
                _send(self._stream, line, self._timeout)
        except TimeoutError:
            self._on_loss(f"has not answered for {self._timeout:g} s")
            self._stream.close()  # half a line may have gone out: nothing can follow it
        except OSError as error:
            self._on_loss(f"closed the connection ({error})")
            self._stream.close()


def _send(stream: Stream, line: bytes, timeout: float) -> None:
    rest = memoryview(line)
    while rest:
        sent = stream.send_some([rest])
        rest = rest[sent:]
        if not sent and not wait_any([], [stream], timeout) and stream.is_unanswered(timeout):
            raise TimeoutError
