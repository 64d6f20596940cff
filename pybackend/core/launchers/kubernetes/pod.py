"""Both ends of the channel between the driver and a pod.

`run` is the main process of a pod after the driver has sent the bundle: it runs one worker to
completion. So this file is imported in the pods, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import ssl
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from pybackend.core.errors import ClusterError
from pybackend.core.job.messages import Event, PrintedLine
from pybackend.core.job.notice import Notice
from pybackend.core.launchers.environment import installing
from pybackend.core.launchers.environment.archive import PackedEnvironment
from pybackend.core.launchers.kubernetes.boot import FAILED
from pybackend.core.launchers.kubernetes.cluster import Cluster
from pybackend.core.launchers.remote import bundle as bundles
from pybackend.core.launchers.remote.bootstrap import MARK
from pybackend.core.launchers.remote.bundle import read_blocks
from pybackend.core.launchers.remote.task import read_post, read_task, take_part
from pybackend.core.machine.capacity import count_cores, list_gpus
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.meeting_client import MeetingClient
from pybackend.core.net.shared_lines import SharedLines, follow_driver
from pybackend.core.words import call_of

_GREETING_SECONDS = 120.0
# For each step of sending an environment: a block, unpacking, the start of its Python.
_ENVIRONMENT_SECONDS = 600.0
_BEAT_SECONDS = 5.0
# A worker sends a heartbeat every five; a lost node does not close the connection.
_SILENT_SECONDS = 90.0
# Kubernetes reports a container as running shortly before it can execute commands there.
_ATTEMPTS = 3
_END_SECONDS = 5.0
# Fits into one message of the API server, and of proxies before it.
_BLOCK = 1 << 15


class PodChannel:
    """The driver's side of a running pod and its worker.

    ``command`` is executed in the pod. ``packed`` is the Python environment of the worker; None:
    what the image has. ``obstacle`` is the error if the pod's Python cannot run workers.
    ``trouble`` is an error on the channel, possibly caused by the end of the pod.
    """

    def __init__(
        self,
        cluster: Cluster,
        pod: str,
        command: list[str],
        rank: int,
        meeting: MeetingServer,
        bundle: bundles.Bundle,
        packed: PackedEnvironment | None = None,
    ) -> None:
        self._pod, self._rank, self._meeting = pod, rank, meeting
        self._bundle, self._packed = bundle, packed
        self._channel: Channel | None = None
        self._is_sent = self._has_greeted = False
        self._began = self._looked = self._moved = time.monotonic()
        self.trouble: ClusterError | None = None
        self.obstacle: ClusterError | None = None
        self._closed, self.has_ended = threading.Event(), threading.Event()
        threading.Thread(target=self._follow, args=(cluster, command), daemon=True).start()

    def check(self) -> None:
        """Close the channel of a silent pod. Raises `ClusterError` if it cannot run workers."""
        now = time.monotonic()
        has_rested = now > self._looked + _SILENT_SECONDS / 2  # this process was stopped
        self._looked = now
        if has_rested and self._channel:
            self._channel.heard = self._moved = now
        if self.obstacle is not None:
            raise self.obstacle
        see = f"See `kubectl logs {self._pod}`"
        if not self._has_greeted and now > self._began + _GREETING_SECONDS:
            raise ClusterError(
                f"pod {self._pod} is running, but its Python did not start within "
                f"{_GREETING_SECONDS:.0f} s. {see}"
            )
        is_sending = self._packed and self._has_greeted and not self._is_sent
        if is_sending and now > self._moved + _ENVIRONMENT_SECONDS:
            raise ClusterError(
                f"pod {self._pod} did not unpack and start the Python environment: nothing "
                f"happened for {_ENVIRONMENT_SECONDS:.0f} s. {see}"
            )
        if self._is_sent and self._channel and now > self._channel.heard + _SILENT_SECONDS:
            self.close()

    def close(self) -> None:
        self._closed.set()
        if self._channel is not None:
            self._channel.close()

    def wait(self) -> None:
        self.has_ended.wait(2 * _END_SECONDS)

    def _follow(self, cluster: Cluster, command: list[str]) -> None:
        try:
            self._channel = channel = self._open(cluster, command)
            if self._closed.is_set():  # meanwhile
                channel.close()
            with contextlib.suppress(OSError, ValueError):
                self._talk(channel)
            channel.close()
            channel.release(_END_SECONDS)
        except ClusterError as error:
            self.trouble = error
        except Exception as error:  # any error: else the driver would wait for this pod
            self.trouble = ClusterError(f"the driver cannot connect to pod {self._pod}: {error!r}")
        finally:
            self.has_ended.set()

    def _open(self, cluster: Cluster, command: list[str]) -> Channel:
        for _ in range(_ATTEMPTS - 1):
            try:
                return Channel(cluster.execute(self._pod, command))
            except ClusterError:
                if self._closed.wait(1.0):  # not once more in a pod that is given up
                    raise
        return Channel(cluster.execute(self._pod, command))

    def _talk(self, channel: Channel) -> None:
        lines = SharedLines(channel.reading, channel.writing)
        line = self._read_line(channel)
        self._has_greeted = True
        try:
            if self._packed is not None:
                line = self._send_environment(self._packed, line, channel, lines)
            self.obstacle = _find_obstacle(bundles.read_greeting(line, f"pod {self._pod}"))
        except ClusterError as error:
            self.obstacle = error
        if self.obstacle is not None:
            return
        self._meeting.adopt(lines.connect(self._rank), self._rank)
        threading.Thread(target=self._send, args=(channel, lines), daemon=True).start()
        lines.read()

    def _read_line(self, channel: Channel) -> bytes:
        """Return the next line for the driver; set `trouble` and raise if the connection ends."""
        said = b""
        for line in channel.reading:
            if line.startswith(MARK):
                self._moved = time.monotonic()
                return line
            said = line.strip() or said
        reason = said.decode(errors="replace") or "the connection ended"
        self.trouble = ClusterError(f"the driver cannot connect to pod {self._pod}: {reason}")
        raise ConnectionResetError(f"the connection to pod {self._pod} ended")

    def _send_environment(
        self, packed: PackedEnvironment, line: bytes, channel: Channel, lines: SharedLines
    ) -> bytes:
        """Send the environment, and return the greeting of its Python.

        ``line`` is the answer of the shell that unpacks it. Raises `ClusterError` if the pod cannot
        run it, or has too little disk.
        """
        answer, host = installing.read_answer([line]), f"pod {self._pod}"
        assert answer is not None
        installing.check_host(packed, answer.machine, answer.libc, host)
        lines.write(b"%d\n" % packed.size)
        for block in read_blocks(packed.path):
            lines.write(block)
            self._moved = time.monotonic()
        greeting = self._read_line(channel)
        if greeting.startswith(FAILED):
            status, printed = json.loads(greeting[len(FAILED) :])
            raise installing.explain_unpacking(host, answer.folder, status, printed)
        return greeting

    def _send(self, channel: Channel, lines: SharedLines) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._bundle.send(lines.write)
            channel.heard = time.monotonic()
            self._is_sent = True
            while not self.has_ended.wait(_BEAT_SECONDS):
                lines.beat()


def _find_obstacle(greeting: bundles.HostGreeting) -> ClusterError | None:
    specify = f"or specify another Python in this image: {call_of('kubernetes', ..., python=...)}"
    advice = (f"Use an image with Python {{own}}, {specify}", f"Install it in the image, {specify}")
    return bundles.find_obstacle(greeting, "the image", "in the image", *advice)


# Bytes to and from a process in a pod, through the API server.


class Channel:
    """Two files that replace the client's `WSClient`, which only one thread at a time may use.

    ``reading`` and ``writing`` are the command's output and input. ``heard`` is the time of the
    last received data, on the monotonic clock.
    """

    def __init__(self, client: Any) -> None:
        self._client = client
        self._near, self._far = socket.socketpair()
        self.reading: IO[bytes] = self._near.makefile("rb")
        self.writing: IO[bytes] = cast(IO[bytes], self._near.makefile("wb", buffering=0))
        self.heard = time.monotonic()
        self._pump = threading.Thread(target=self._run, daemon=True)
        self._pump.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._near.shutdown(socket.SHUT_RDWR)

    def release(self, seconds: float) -> None:
        self._pump.join(seconds)
        for one in (self.reading, self.writing, self._near):
            one.close()

    def _run(self) -> None:
        from websocket import WebSocketException

        with contextlib.suppress(OSError, ValueError, WebSocketException):
            while self._client.is_open() and self._pass_on():
                pass
        with contextlib.suppress(OSError, WebSocketException):
            self._deliver()
            self._client.close(timeout=1)
        # If the other end has already closed, the call above did not close the socket.
        self._client.sock.shutdown()
        self._far.close()

    def _pass_on(self) -> bool:
        """Forward available data in both directions; return whether the near end is open."""
        waiting = self._client.sock.sock
        poll = select.poll()
        poll.register(self._far, select.POLLIN)
        poll.register(waiting, select.POLLIN)
        # TLS may have buffered more data than was read.
        has_more = isinstance(waiting, ssl.SSLSocket) and waiting.pending() > 0
        ready = {number for number, _ in poll.poll(0 if has_more else None)}
        if has_more or waiting.fileno() in ready:
            self._deliver()
        if self._far.fileno() in ready:
            if not (block := self._far.recv(_BLOCK)):
                return False
            self._client.write_stdin(block)
        return True

    def _deliver(self) -> None:
        self._client.update(timeout=0)
        # Not `read_stdout`: the client would store a copy of everything.
        if content := self._client.read_all():
            self.heard = time.monotonic()
            self._far.sendall(content)


# Servers between the driver and this pod keep their connection open if the driver's machine
# crashes. A driver that was only stopped may continue within this time.
_DRIVER_SILENT_SECONDS = 600.0


def run(folder: str, pipe: IO[bytes], channel: int) -> NoReturn:
    """Run this pod's worker, report, and wait until the driver has read everything.

    If the pod ended earlier, so would the process that forwards its messages. The worker writes
    only below ``folder``, that of the bundle. If ``pipe`` from the driver closes, the pod ends.
    """
    # The kernel ignores signals to a pod's first process if it has no handler for them.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    lines = SharedLines(pipe, os.fdopen(channel, "wb", buffering=0))
    status = 1

    def end() -> NoReturn:
        if status:
            print("tfdist: the driver has ended, or cannot be reached", file=sys.stderr, flush=True)
        os._exit(status)  # and with its first process, all others of the pod

    rank = int(os.environ["TFDIST_RANK"])
    # No token: Kubernetes has authenticated both ends of the channel.
    meeting = _LoggedMeeting(None, "", rank, 0.0, end, stream=lines.connect(rank))
    reader = follow_driver(lines, end, _DRIVER_SILENT_SECONDS)
    status = 0 if _work(rank, Path(folder), meeting) else 1
    reader.join()
    end()


def _work(rank: int, folder: Path, meeting: MeetingClient) -> bool:
    """Run the worker, and return whether it succeeded; failures are reported to the driver."""
    if (task := read_task(folder, {rank: meeting})) is None:
        return False
    notice, job = Notice(), task.member.job
    if job.can_go_on:
        signal.signal(signal.SIGTERM, notice.take)
    cores = int(os.environ.get("TFDIST_CORES") or count_cores())
    # A pod sees only its own GPUs, so they need not be divided.
    gpus = None if job.resources.gpus is None else list_gpus()
    reached = os.environ.get("TFDIST_ADDRESS")
    return take_part(task, rank, [folder], meeting, cores, gpus, reached, notice, read_post(folder))


class _LoggedMeeting(MeetingClient):
    """Connection to the driver that also writes the worker's output to the pod's log."""

    def __call__(self, event: Event) -> bool:
        if isinstance(event, PrintedLine):
            print(event.text, file=sys.stderr, flush=True)
        return super().__call__(event)
