"""The members of a gang meet at the driver, over authenticated connections: a member's side."""

from __future__ import annotations

import base64
import contextlib
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from pybackend.errors import ClusterError
from pybackend.job.codec import decode, encode
from pybackend.job.messages import Event
from pybackend.net.meeting import PURPOSE, Everyone, Join, MeetElsewhere, Part
from pybackend.net.rendezvous import connect
from pybackend.net.stream import Stream

# The messages of all members.
_LONGEST_ANSWER = 1 << 30
# base64 makes four bytes of three, and some are left for the rest of the line.
_PART = 3 << 17
# How long the driver may take to read what it is sent.
_SEND_SECONDS = 120.0
# Others may still read their rows.
_ANSWER_SECONDS = 6 * 3600.0
# Events that wait for the connection; the oldest give way.
_MOST_WAITING = 10_000


class MeetingClient:
    """A member's connection to the driver's `MeetingServer`; a context manager.

    It connects in the background, so that a driver behind a firewall delays no worker. Events wait
    for the connection, and are dropped if there is none.

    Parameters
    ----------
    address
        ``host:port`` of the driver; None if it cannot be reached.
    token, rank
        Of the job and of this member.
    patience
        Seconds in which the driver must be reached.
    on_lost
        Called from a thread when the driver closes the connection.
    """

    def __init__(
        self,
        address: str | None,
        token: str,
        rank: int,
        patience: float,
        on_lost: Callable[[], None] = lambda: None,
    ) -> None:
        self._address = address
        self._rank = rank
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._stream: Stream | None = None
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._error: Exception | None = None
        self._settled = threading.Event()
        self._closed = False
        self._answers: queue.Queue[Everyone | MeetElsewhere | None] = queue.Queue()
        self._deadline = time.monotonic() + patience
        if address is None:
            self._settled.set()
        else:
            greeting = (address, token, rank)
            threading.Thread(target=self._run, args=greeting, daemon=True).start()

    def __enter__(self) -> MeetingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, event: Event) -> bool:
        """Send one event; returns whether it is known to have gone out."""
        return self._send(_line(event), may_wait=True)

    def require(self) -> None:
        """Wait until the driver is reached.

        Raises
        ------
        ClusterError
            If it is not.
        """
        self._settled.wait()
        if self._error is not None:
            raise ClusterError(
                f"worker {self._rank} on {socket.gethostname()} cannot reach the driver at "
                f"{self._address}: {self._error}. Set spark.driver.host to an address of the "
                "driver that the executors reach, and open its ports to them"
            ) from self._error

    def gather(self, message: str) -> list[str] | None:
        """Meet the others, once.

        Returns
        -------
        list of str or None
            Everyone's messages by rank, when all have sent theirs; None if all members have to
            meet elsewhere, and this one knows that the others will.

        Raises
        ------
        ClusterError
            When the driver has ended the job, or is lost before it has answered.
        """
        self._settled.wait()
        # Not sent in full means not joined: the driver then sends the others elsewhere, too.
        if not self._answers.empty() or not self._send(_line(Join(message)), may_wait=False):
            return None
        try:
            answer = self._answers.get(timeout=_ANSWER_SECONDS)
        except queue.Empty:
            raise ClusterError(
                f"worker {self._rank} on {socket.gethostname()} has waited "
                f"{_ANSWER_SECONDS / 3600:g} hours for the other workers to read their rows: one "
                "of them hangs. See the logs of their hosts"
            ) from None
        if answer is None:
            raise ClusterError(
                f"worker {self._rank} on {socket.gethostname()} lost the driver at "
                f"{self._address} before all workers had met: the driver has ended the job, or the "
                "network between them failed. If the driver still runs, start again"
            )
        return list(answer.messages) if isinstance(answer, Everyone) else None

    def send(self, name: str, content: bytes) -> None:
        """Send a result, whatever its size.

        Raises
        ------
        ClusterError
            When the driver is lost.
        """
        for start in range(0, max(1, len(content)), _PART):
            part = Part(name, base64.b64encode(content[start : start + _PART]).decode())
            if not self._send(_line(part), may_wait=False):
                raise ClusterError(f"worker {self._rank} lost the driver while it sent {name}")

    def close(self) -> None:
        """Close the connection, once what waits for it is sent."""
        self._settled.wait()
        with self._lock:
            self._closed = True
            if self._stream is not None:
                self._stream.close()
            self._stream = None

    def _send(self, line: bytes, *, may_wait: bool) -> bool:
        with self._lock:
            if may_wait and not self._settled.is_set():
                self._waiting.append(line)
                return False
            return self._send_now(line)

    def _send_now(self, line: bytes) -> bool:
        if self._stream is None:
            return False
        try:
            self._stream.send_all(line, _SEND_SECONDS)
        except OSError:
            self._stream.close()
            self._stream = None
        return self._stream is not None

    def _run(self, address: str, token: str, rank: int) -> None:
        """Connect, then read until the driver closes the connection."""
        stream = None
        try:
            stream = self._connect(address, token, rank)
            stream.keep_alive()
        except (OSError, ValueError) as error:  # a name that is too long is a `ValueError`
            self._error = error
        finally:
            with self._lock:
                self._stream = stream
                for line in self._waiting:
                    self._send_now(line)
                self._settled.set()
        if stream is None:
            return
        with contextlib.suppress(OSError, ValueError):
            while line := stream.read_line(_LONGEST_ANSWER):
                answer: Any = decode(line, Everyone, MeetElsewhere)
                self._answers.put(answer)
        self._answers.put(None)
        if not self._closed:
            self._on_lost()

    def _connect(self, address: str, token: str, rank: int) -> Stream:
        """Try again for a while: a server with too many greetings at once rejects some."""
        while True:
            remaining = max(0.1, self._deadline - time.monotonic())
            try:
                return connect(address, token, rank, PURPOSE, remaining)
            except ConnectionRefusedError:
                raise
            except OSError:
                if time.monotonic() + 0.5 > self._deadline:
                    raise
            time.sleep(0.5)


def _line(message: object) -> bytes:
    return encode(message).encode() + b"\n"
