"""The workers' rendezvous at the driver, over authenticated connections: the worker's side."""

from __future__ import annotations

import contextlib
import math
import queue
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, get_args

from pybackend.core.errors import ClusterError
from pybackend.core.job.codec import decode, encode_line
from pybackend.core.job.messages import Event, FromLauncher
from pybackend.core.net import meeting
from pybackend.core.net.authentication import RejectedError
from pybackend.core.net.liveness import Beat, SilentError, read_lines, start_beating
from pybackend.core.net.rendezvous import connect
from pybackend.core.net.stream import AlteredError, LineStream, Stream

# Size of the messages of all workers.
_LONGEST_ANSWER = 1 << 30
# Time limit for sending to a driver that does not read.
_SEND_SECONDS = 120.0
# Other workers may still be reading their rows.
_ANSWER_SECONDS = 6 * 3600.0
_RETRY_SECONDS = 0.5
# A server that is about to close rejects once.
_MOST_REJECTIONS = 3
# Events that wait for the connection; the oldest are dropped.
_MOST_WAITING = 10_000
_FROM_SERVER = (
    meeting.Everyone,
    meeting.MeetElsewhere,
    meeting.Refused,
    meeting.ResultPart,
    meeting.Finished,
    Beat,
    *get_args(FromLauncher),
)


class MeetingClient:
    """Connection of a worker to the driver's `MeetingServer`; a context manager.

    It connects in the background, so that a driver behind a firewall does not delay any worker.
    Events wait for the connection, and are dropped if there is none.

    The driver at ``address`` (``host:port``; None if it cannot be reached) must be reached within
    ``patience`` seconds. If ``is_early``, it may not be listening yet: then a refused connection is
    retried, too. An authenticated connection, ``stream``, may replace the address. ``on_lost`` is
    called from a thread when the driver closes the connection, or has shown no sign of life for
    ``silence`` seconds; infinite if it does not send any.
    """

    def __init__(
        self,
        address: str | None,
        token: str,
        rank: int,
        patience: float,
        on_lost: Callable[[], None] = lambda: None,
        is_early: bool = False,
        stream: LineStream | None = None,
        silence: float = math.inf,
    ) -> None:
        self._silence = silence
        self.is_silent = False
        """True if the driver was lost because of its silence."""
        self._is_early = is_early
        self._parts: dict[str, bytearray] = {}
        self._finished = threading.Event()
        self._address = address
        self._rank = rank
        self._on_lost = on_lost
        self._lock = threading.Lock()
        self._stream: LineStream | None = stream
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._error: Exception | None = None
        self._loss = "the driver ended the job, or the network connection to it failed"
        self._settled = threading.Event()
        self._has_ended = threading.Event()
        self._closed = False
        self._ends = threading.Event()
        self._answers: queue.Queue[meeting.Decision | None] = queue.Queue()
        self._orders: queue.Queue[FromLauncher] = queue.Queue()
        self._deadline = time.monotonic() + patience
        if stream is not None:
            self._settled.set()
            threading.Thread(target=self._read, args=(stream,), daemon=True).start()
        elif address is None:
            self._settled.set()
        else:
            greeting = (address, token, rank)
            threading.Thread(target=self._run, args=greeting, daemon=True).start()

    def __enter__(self) -> MeetingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, event: Event) -> bool:
        """Send one event; return whether it is known to be sent."""
        return self._send(encode_line(event), may_wait=True)

    def require(self) -> None:
        """Wait until the driver is reached; raise `ClusterError` if it is not."""
        self._settled.wait()
        if self._error is not None:
            raise ClusterError(
                f"worker {self._rank} on {socket.gethostname()} cannot reach the driver "
                f"at {self._address}: {self._error}. Set spark.driver.host to an address of the "
                "driver that the executors can reach, and open its ports to them"
            ) from self._error

    def wait_until_settled(self, seconds: float) -> bool:
        """Wait, and return whether the driver is reached, or known to be unreachable (`error`)."""
        return self._settled.wait(seconds)

    @property
    def error(self) -> Exception | None:
        """Error that prevented the driver from being reached, or None."""
        return self._error

    @property
    def has_ended(self) -> bool:
        """True if the connection has ended, or the driver has nothing more to send."""
        return self._has_ended.is_set() or self._finished.is_set()

    def start_beating(self, silence: float) -> None:
        """Send signs of life to the driver, several times per ``silence`` seconds."""
        line = encode_line(Beat())
        start_beating(lambda: self._send(line, may_wait=False), silence, self._ends)

    def gather(self, message: str, on_wait: Callable[[], None] = lambda: None) -> list[str] | None:
        """Rendezvous with the others, once; ``on_wait`` is called repeatedly in the meantime.

        Returns the messages from all workers by rank, when all have sent theirs; None if all
        workers must meet elsewhere, as the others then will, too. Raises `ClusterError` if the
        driver ended the job, rejected this worker, or was lost before it answered.
        """
        self._settled.wait()
        # A message that was not sent completely does not join: the driver then sends the others
        # elsewhere, too.
        line = encode_line(meeting.Join(message))
        if not self._answers.empty() or not self._send(line, may_wait=False):
            return None
        answer = self._wait_for_answer(on_wait)
        if isinstance(answer, meeting.Refused):
            raise ClusterError(answer.reason)
        if answer is None:
            at = f" at {self._address}" if self._address else ""
            raise ClusterError(
                f"worker {self._rank} on {socket.gethostname()} lost the driver{at} before all "
                f"workers had connected: {self._loss}. If the driver is still running, start again"
            )
        return list(answer.messages) if isinstance(answer, meeting.Everyone) else None

    def _wait_for_answer(self, on_wait: Callable[[], None]) -> meeting.Decision | None:
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline:
            # A short wait, so that Python's main thread and R notice Ctrl-C.
            with contextlib.suppress(queue.Empty):
                return self._answers.get(timeout=0.1)
            on_wait()
        raise ClusterError(
            f"worker {self._rank} on {socket.gethostname()} has waited {_ANSWER_SECONDS / 3600:g} "
            "hours for the other workers to read their rows: one of them is hanging. See the logs "
            "of their hosts"
        )

    def receive(
        self, seconds: float, on_wait: Callable[[], None] = lambda: None
    ) -> Mapping[str, bytes] | None:
        """Receive the contents from `MeetingServer.send` by name; None if the driver is lost.

        ``on_wait`` is called repeatedly in the meantime. Raises `TimeoutError` if they do not
        arrive within ``seconds``.
        """
        deadline = time.monotonic() + seconds
        while not self._finished.wait(0.1):  # short: see `_wait_for_answer`
            if self._has_ended.is_set() and not self._finished.is_set():
                return None
            if time.monotonic() > deadline:
                raise TimeoutError(f"nothing was received for {seconds:g} s")
            on_wait()
        return {name: bytes(content) for name, content in self._parts.items()}

    def take_order(self) -> FromLauncher:
        """Wait for the next order from `MeetingServer.order`."""
        return self._orders.get()

    def poll_order(self) -> FromLauncher | None:
        with contextlib.suppress(queue.Empty):
            return self._orders.get_nowait()
        return None

    def send(self, name: str, content: bytes) -> None:
        """Send a result of any size; raise `ClusterError` if the driver is lost."""
        for part in meeting.split(name, content):
            if not self._send(part, may_wait=False):
                raise ClusterError(f"worker {self._rank} lost the driver while it sent {name}")

    def close(self) -> None:
        """Close the connection once all waiting messages have been sent."""
        self._ends.set()
        if not self._is_early:
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
                if self._closed and stream is not None:
                    stream.close()
                    stream = None
                self._stream = stream
                for line in self._waiting:
                    self._send_now(line)
                self._settled.set()
        if stream is not None:
            self._read(stream)

    def _read(self, stream: LineStream) -> None:
        try:
            for line in read_lines(stream, _LONGEST_ANSWER, self._silence):
                self._take(decode(line, *_FROM_SERVER), stream)
        except SilentError as error:
            self.is_silent = True
            self._loss = str(error)
        except AlteredError as error:
            self._loss = f"{error}: something between the two hosts changes the data"
        except (OSError, ValueError):
            pass
        self._answers.put(None)
        self._has_ended.set()
        if not self._closed:
            self._on_lost()

    def _take(self, message: Any, stream: LineStream) -> None:
        if isinstance(message, meeting.ResultPart):
            content = self._parts.setdefault(message.name, bytearray())
            content += meeting.read_part(stream, message, self._silence)
        elif isinstance(message, meeting.Finished):
            self._finished.set()
        elif isinstance(message, FromLauncher):
            self._orders.put(message)
        elif not isinstance(message, Beat):
            self._answers.put(message)

    def _connect(self, address: str, token: str, rank: int) -> Stream:
        """Connect, with retries: a server with too many greetings at once rejects some."""
        rejections = 0
        while True:
            remaining = max(0.1, self._deadline - time.monotonic())
            try:
                return connect(address, token, rank, meeting.PURPOSE, remaining)
            except socket.gaierror:  # an unknown host name
                raise
            except OSError as error:
                is_refused = isinstance(error, ConnectionRefusedError)
                if is_refused and not self._is_early:
                    raise
                # A process listens there, but not for this job. A server with too many greetings
                # closes earlier.
                rejections += isinstance(error, RejectedError)
                is_hopeless = self._is_early and rejections > _MOST_REJECTIONS
                is_late = time.monotonic() + _RETRY_SECONDS > self._deadline
                if is_hopeless or is_late:
                    raise
            if self._ends.wait(_RETRY_SECONDS):
                raise ConnectionAbortedError("this end was closed")
