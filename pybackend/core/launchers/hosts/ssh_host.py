"""The driver's side of a host: the process there, the connections to its workers, its keeper."""

from __future__ import annotations

import atexit
import os
import queue
import re
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO

from pybackend.core.errors import ClusterError, Failure
from pybackend.core.job.job import LOGGER, Job
from pybackend.core.launchers.base import check_stop
from pybackend.core.launchers.fork_server import is_off
from pybackend.core.launchers.hosts.ssh import (
    CONNECTION_LOST,
    KEEPER,
    HostProcess,
    HostPython,
    end_all,
)
from pybackend.core.launchers.remote.bundle import (
    LIBRARY,
    Bundle,
    HostGreeting,
    find_greeting,
    read_greeting,
)
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.shared_lines import SharedLines

_LOG_LINES = 40
# For the processes there to end and to remove their files.
_END_SECONDS = 15.0
# Until Python has started there: login and its file system may be slow.
_GREETING_SECONDS = 90.0
# Limit for a host that receives nothing and sends nothing; it sends every few seconds.
_SILENT_SECONDS = 300.0
_LOST_ADVICE = "check whether that host is still running, and whether it ran out of memory or disk"
_LAST_WORDS = re.compile(r"^(Timeout|Connection|client_loop|packet_|ssh_|Disconnect)|Broken pipe")


@dataclass(eq=False)
class SshHost(HostProcess):
    """A process on a host, over ssh or on this machine, and the workers that it starts.

    ``task`` and ``wanted`` are as in `bootstrap_command`. ``option`` is the argument with which
    users specify another Python, for messages. ``check`` raises `ClusterError` if the Python that
    greets cannot run the workers.
    """

    python: HostPython
    ranks: Sequence[int]
    meeting: MeetingServer
    task: str
    option: str
    wanted: str = ""
    check: Callable[[HostGreeting], object] = lambda greeting: None

    def __post_init__(self) -> None:
        self._name = self.python.host.name
        self._log: deque[str] = deque(maxlen=_LOG_LINES)
        self._bundles: queue.Queue[Bundle | None] = queue.Queue()
        self._has_greeted = False
        self._is_reading = False
        self._trouble: ClusterError | None = None
        self._status: int | None = None
        # Time when the host last received something, and of the last check.
        self._moved = self._looked = time.monotonic()
        self._lines: SharedLines | None = None
        super().__init__(self.python.start(self.wanted, self.task))
        self._printer = threading.Thread(target=self._keep_log, daemon=True)
        self._follower = threading.Thread(target=self._follow, daemon=True)
        self._printer.start()
        self._follower.start()

    def send(self, bundle: Bundle) -> None:
        self._moved = self._looked = time.monotonic()
        self._bundles.put(bundle)

    def look(self) -> list[Failure]:
        """Return the known failures here. Raises `ClusterError` if no worker can run here."""
        if self._trouble is not None:
            raise self._trouble
        if self._status is None:
            self._check_progress()
            return []
        if self._status == 0 or not all(map(self.meeting.has_left, self.ranks)):
            return []
        return self._describe_loss()

    def _check_progress(self) -> None:
        now = time.monotonic()
        has_rested = now > self._looked + _SILENT_SECONDS / 2  # this process was stopped
        self._looked = now
        heard = max(self._moved, self._lines.heard if self._lines else 0.0)
        if has_rested:
            self._moved = now
        elif not self._has_greeted and now > heard + _GREETING_SECONDS:
            late = f"did not start on {self._name} within {now - heard:.0f} s after ssh started"
            advice = "Log in manually to see what it is waiting for"
            raise ClusterError(f"{self.python.path} {late}. {advice}")
        elif now > heard + _SILENT_SECONDS:
            raise ClusterError(
                f"{self._name} has been silent for {now - heard:.0f} s. Check whether its disk is "
                "full, or whether the process that runs the workers there was stopped"
            )

    def let_go(self) -> None:
        self._bundles.put(None)
        if not self._is_reading:  # ssh may not notice in time that its input has closed
            self._process.terminate()
        super().let_go()

    def wait(self, seconds: float) -> None:
        super().wait(seconds)
        self._follower.join(timeout=5)

    def _follow(self) -> None:
        with self._reading(self._process.stdout) as reading:
            self._talk(reading)
        status = self._process.wait()
        self._printer.join(timeout=1)
        if not self._has_greeted:
            self._trouble = self._explain_start(status)
        self._status = status

    def _talk(self, reading: IO[bytes]) -> None:
        line = find_greeting(reading)
        if line is None:
            return
        self._moved = time.monotonic()
        self._has_greeted = True
        try:
            self.check(read_greeting(line, self._name))
        except ClusterError as error:
            self._trouble = error
        bundle = None if self._trouble else self._bundles.get()
        if bundle is None:
            self.let_go()
            return
        lines = self._lines = SharedLines(reading, self._input)
        for rank in self.ranks:
            self.meeting.adopt(lines.connect(rank), rank)

        def write(content: bytes) -> None:
            lines.write(content)
            self._moved = time.monotonic()

        try:
            bundle.send(write)
            self._is_reading = True
        finally:
            lines.read()

    def _keep_log(self) -> None:
        with self._reading(self._process.stderr) as printed:
            for line in printed:
                self._log.append(line.decode(errors="replace").rstrip()[:2000])

    def _explain_start(self, status: int) -> ClusterError:
        printed, path = [line for line in self._log if line], self.python.path
        if status == CONNECTION_LOST and self.python.ssh is not None:
            return self.python.ssh.explain(self.python.host, printed)
        said = f": {printed[-1]}" if printed else ""
        reason = f"{self._name} has no Python at {path}{said}. Specify one that every host has"
        if status not in (126, 127):
            reason = f"{path} on {self._name} exited with status {status} before it could run "
            reason += f"workers{said}. Run it there manually, or specify another one"
        return ClusterError(f"{reason}: {self.option}")

    def _describe_loss(self) -> list[Failure]:
        printed = tuple(line for line in self._log if line)
        last = printed[-1] if printed else ""
        message = "the process that runs the workers on its host "
        if self._status == CONNECTION_LOST and _LAST_WORDS.search(last):
            message = f"the ssh connection to its host ended: {last}"
        elif self._status in (CONNECTION_LOST, -signal.SIGKILL):
            message += "was killed"
        else:
            message += f"exited with status {self._status}: {last}"
        what = "HostLost", message, "", printed, time.time(), _LOST_ADVICE
        return [Failure(rank, self._name, *what) for rank in self.ranks]


@contextmanager
def reached(hosts: Iterable[SshHost]) -> Iterator[list[SshHost]]:
    """Start processes on hosts; on exit, stop them there and remove their files."""
    started: list[SshHost] = []
    try:
        for host in hosts:
            started.append(host)  # one by one: those before one that does not start must end
        yield started
    finally:
        end_all(started, _END_SECONDS)


# A call does not wait longer for a keeper, and starts its workers as usual.
_KEEPER_SECONDS = 20.0
_KEEPER_END_SECONDS = 5.0


def find_keepers(
    job: Job, pythons: Sequence[HostPython], contents: Mapping[str, bytes]
) -> list[dict[str, bytes]]:
    """Return the file of each host's bundle that names its keeper; empty if it has none.

    The keepers get this package from ``contents``, the bundle's files.
    """
    found: list[_Keeper] = []
    if is_off():
        _KEEPERS.close()
    elif job.resources.fork_server and job.kind != "run":  # functions are not forked: see `Child`
        library = {LIBRARY: contents[LIBRARY]}
        try:
            # All start before the first one is waited for.
            found = [_KEEPERS.find(python, library) for python in pythons]
        except OSError as error:  # no more processes, for example
            LOGGER.debug("no fork servers: %s", error)
    names = [keeper.name() for keeper in found] or [b""] * len(pythons)
    return [{KEEPER: name} if name else {} for name in names]


@dataclass(eq=False)
class _Keeper(HostProcess):
    """A process on a host that owns a fork server for all calls. It ends with its ssh process."""

    python: HostPython
    library: Mapping[str, bytes]

    def __post_init__(self) -> None:
        self._name = b""
        self._has_answered = threading.Event()
        self._deadline = time.monotonic() + _KEEPER_SECONDS
        super().__init__(self.python.start("", "hosts.keeper_task.run_keeper", subprocess.DEVNULL))
        threading.Thread(target=self._follow, daemon=True).start()

    def is_running(self) -> bool:
        return self._process.poll() is None

    def has(self, python: HostPython, library: Mapping[str, bytes]) -> bool:
        return self.library == library and self.is_running() and self.python == python

    def name(self) -> bytes:
        """Return the line that it has sent, a `Keeper`; empty if it has ended or is slow."""
        while not self._has_answered.wait(0.1) and time.monotonic() < self._deadline:
            check_stop()
        is_whole = self._name.endswith(b"\n")
        return self._name if is_whole and self.is_running() else b""

    def leave(self) -> None:
        """Leave it to the process that this one was forked from."""
        self.let_go()
        self._process.returncode = 0  # not a child of this process

    def _follow(self) -> None:
        with self._reading(self._process.stdout) as reading:
            lines = SharedLines(reading, self._input)
            if find_greeting(reading) is not None:
                Bundle(self.library).send(lines.write)
                self._name = reading.readline()
                self._has_answered.set()
                lines.read()  # only signs of life
        self._has_answered.set()
        self.let_go()
        self._process.wait()


class _Keepers:
    """The keepers of this session, by login.

    They end with it, because ssh's pipe closes even if the session is killed, or ten minutes after
    a call.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[str, _Keeper] = {}

    def find(self, python: HostPython, library: Mapping[str, bytes]) -> _Keeper:
        # Jobs that share the host have different parts of it.
        host = replace(python.host, slots=1, first=0, neighbours=None)
        python = replace(python, host=host)
        with self._lock:
            known = self._running.get(host.login)
            if known is not None and known.has(python, library):
                return known
            if known is not None:
                known.let_go()
            found = self._running[host.login] = _Keeper(python, library)
            return found

    def close(self) -> None:
        with self._lock:
            running, self._running = list(self._running.values()), {}
        end_all(running, _KEEPER_END_SECONDS)

    def leave(self) -> None:
        for keeper in self._running.values():
            keeper.leave()
        self._lock, self._running = threading.Lock(), {}


_KEEPERS = _Keepers()
atexit.register(_KEEPERS.close)
if hasattr(os, "register_at_fork"):
    # The keepers are children of the session, not of a process that it forks.
    os.register_at_fork(after_in_child=_KEEPERS.leave)
