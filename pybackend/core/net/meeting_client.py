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
from dataclasses import dataclass, field
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
_FROM_SERVER = (*get_args(meeting.FromServer), *get_args(FromLauncher))


@dataclass(eq=False)
class MeetingClient(contextlib.AbstractContextManager["MeetingClient"]):
    """Connection of a worker to the driver's `MeetingServer`; a context manager.

    It connects in the background, so that a driver behind a firewall does not delay any worker.
    Events wait for the connection, and are dropped if there is none.

    The driver at ``address`` (``host:port``; None if it cannot be reached) must be reached within
    ``patience`` seconds. If ``is_early``, it may not be listening yet: then a refused connection is
    retried, too. An authenticated connection, ``stream``, may replace the address. ``on_lost`` is
    called from a thread when the driver closes the connection, or has shown no sign of life for
    ``silence`` seconds; infinite if it does not send any.
    """

    address: str | None
    token: str = field(repr=False)
    rank: int
    patience: float
    on_lost: Callable[[], None] = lambda: None
    is_early: bool = False
    stream: LineStream | None = None
    silence: float = math.inf

    def __post_init__(self) -> None:
        self.is_silent = False
        """True if the driver was lost because of its silence."""
        self.error: Exception | None = None
        """Error that prevented the driver from being reached, or None."""
        self._parts: dict[str, bytearray] = {}
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._loss = "the driver ended the job, or the network connection to it failed"
        self._settled = threading.Event()
        self._has_ended = threading.Event()
        self._closed = False
        self._ends = threading.Event()
        self._answers: queue.Queue[meeting.Decision | None] = queue.Queue()
        self._orders: queue.Queue[FromLauncher] = queue.Queue()
        self._deadline = time.monotonic() + self.patience
        if self.stream is not None or self.address is None:
            self._settled.set()
        threading.Thread(target=self._run, args=(self.stream,), daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def __call__(self, event: Event) -> bool:
        """Send one event; return whether it is known to be sent."""
        return self._send(encode_line(event), may_wait=True)

    def require(self) -> None:
        """Wait until the driver is reached; raise `ClusterError` if it is not."""
        self._settled.wait()
        if self.error is not None:
            raise ClusterError(
                f"{self._name()} cannot reach the driver at {self.address}: {self.error}. Set "
                "spark.driver.host to an address of the driver that the executors can reach, and "
                "open its ports to them"
            ) from self.error

    def _name(self) -> str:
        return f"worker {self.rank} on {socket.gethostname()}"

    def wait_until_settled(self, seconds: float) -> bool:
        """Wait, and return whether the driver is reached, or known to be unreachable (`error`)."""
        return self._settled.wait(seconds)

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
            at = f" at {self.address}" if self.address else ""
            raise ClusterError(
                f"{self._name()} lost the driver{at} before all workers had connected: "
                f"{self._loss}. If the driver is still running, start again"
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
            f"{self._name()} has waited {_ANSWER_SECONDS / 3600:g} hours for the other workers to "
            "read their rows: one of them is hanging. See the logs of their hosts"
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
                raise ClusterError(f"worker {self.rank} lost the driver while it sent {name}")

    def close(self) -> None:
        """Close the connection once all waiting messages have been sent."""
        self._ends.set()
        if not self.is_early:
            self._settled.wait()
        with self._lock:
            self._closed = True
            self._drop()

    def _drop(self) -> None:
        if self.stream is not None:
            self.stream.close()
        self.stream = None

    def _send(self, line: bytes, *, may_wait: bool) -> bool:
        with self._lock:
            if may_wait and not self._settled.is_set():
                self._waiting.append(line)
                return False
            return self._send_now(line)

    def _send_now(self, line: bytes) -> bool:
        try:
            if self.stream is not None:
                self.stream.send_all(line, _SEND_SECONDS)
        except OSError:
            self._drop()
        return self.stream is not None

    def _run(self, stream: LineStream | None) -> None:
        """Connect unless it is connected, then read until the driver closes the connection."""
        try:
            if stream is None and self.address is not None:
                stream = self._connect(self.address)
                stream.keep_alive()
        except (OSError, ValueError) as error:  # a name that is too long is a `ValueError`
            self.error = error
        finally:
            self._settle(stream)
        if stream is not None:
            self._read(stream)

    def _settle(self, stream: LineStream | None) -> None:
        with self._lock:
            if not self._settled.is_set():
                self.stream = stream
                if self._closed:
                    self._drop()
                for line in self._waiting:
                    self._send_now(line)
                self._settled.set()

    def _read(self, stream: LineStream) -> None:
        try:
            for line in read_lines(stream, _LONGEST_ANSWER, self.silence):
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
            self.on_lost()

    def _take(self, message: Any, stream: LineStream) -> None:
        if isinstance(message, meeting.ResultPart):
            part = meeting.read_part(stream, message, self.silence)
            self._parts.setdefault(message.name, bytearray()).extend(part)
        elif isinstance(message, meeting.Finished):
            self._finished.set()
        elif isinstance(message, FromLauncher):
            self._orders.put(message)
        elif not isinstance(message, Beat):
            self._answers.put(message)

    def _connect(self, address: str) -> Stream:
        """Connect, with retries: a server with too many greetings at once rejects some."""
        rejections = 0
        while True:
            remaining = max(0.1, self._deadline - time.monotonic())
            try:
                return connect(address, self.token, self.rank, meeting.PURPOSE, remaining)
            except OSError as error:
                # A process listens there, but not for this job. A server with too many greetings
                # closes earlier.
                rejections += isinstance(error, RejectedError)
                is_refused = isinstance(error, ConnectionRefusedError)
                is_hopeless = rejections > _MOST_REJECTIONS if self.is_early else is_refused
                is_late = time.monotonic() + _RETRY_SECONDS > self._deadline
                is_unknown = isinstance(error, socket.gaierror)
                if is_hopeless or is_late or is_unknown:
                    raise
            if self._ends.wait(_RETRY_SECONDS):
                raise ConnectionAbortedError("this end was closed")
