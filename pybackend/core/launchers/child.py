"""A worker process, and the folder, socket and pipes that its launcher shares with it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum, auto
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from pybackend.core.data.files import naming_full_disk
from pybackend.core.errors import Failure, Kind, Moment, printable
from pybackend.core.job import messages
from pybackend.core.job.codec import encode_line
from pybackend.core.job.job import LOGGER, TRAINED, Job
from pybackend.core.job.messages import Emit
from pybackend.core.job.notice import PREEMPTED, RESTARTS
from pybackend.core.job.report import WorkerReport, read_report
from pybackend.core.launchers.fork_server import popen, start_worker, worker_variables
from pybackend.core.launchers.forking import ForkedProcess, end_marked, name_signal, signal_group
from pybackend.core.launchers.watches import MemoryWatch, OomWatch, StallWatch
from pybackend.core.machine.janitor import swept_folder
from pybackend.core.net.rendezvous import address_of, listen, reserve
from pybackend.core.quiet import is_noise
from pybackend.core.words import call_of, setting, show_bytes
from pybackend.core.worker import JOB, REPORT

if TYPE_CHECKING:
    from pybackend.core.launchers.environment.installing import Interpreter

LOG_LINES = 40
_LONGEST_LINE = 2000
_LOOK_SECONDS = 0.05
_STALL_ADVICE = (
    "resume such a process (kill -CONT) within `timeout` seconds, raise `timeout`, or check the "
    "disk that contains that host's temporary folder"
)
_PREEMPTED_ADVICE = (
    f"with a folder in `recovery`, a training run saves its state before it ends, and {RESTARTS}"
)
_OOM_ADVICE = "lower batch_size or use fewer workers per host"
_MEMORY_ADVICE = (
    "give it more `memory`, lower batch_size, or use more workers, which share the rows"
)


class State(IntEnum):
    """State of a `Child`. Each is followed by later ones only."""

    MADE = auto()  # it has a folder and a socket, but no process
    STARTED = auto()
    JOINED = auto()  # it knows the other workers; in each generation
    NOTIFIED = auto()  # it received the SIGTERM that announces its machine's end
    REPORTED = auto()
    KILLED = auto()  # it may still run: a process that waits for a frozen disk cannot be killed
    ENDED = auto()  # its exit status was read: another process may have its PID
    CLOSED = auto()  # its folder was removed


class Child:
    """One worker process, from creating its folder to reading its report.

    A context manager: on exit, the process and all its descendants are killed, and its folder and
    ports are released.

    Others reach this machine at ``host``. ``emit`` gets the worker's events, from a thread.
    ``environment`` adds to this process's variables. ``rscript`` runs the worker with Python
    embedded in R; None: Python itself, that of ``interpreter`` or of this process. On ``server``
    the worker accepts connections from the others; None: a new socket on ``host``. Three functions
    are polled: ``give_up`` returns why to stop waiting for the worker, or None; ``notice`` whether
    this process received SIGTERM, which is then sent to the worker; ``orders`` the next message for
    the worker, or None.
    """

    def __init__(
        self,
        job: Job,
        rank: int,
        host: str,
        emit: Emit,
        environment: Mapping[str, str] | None = None,
        rscript: str | None = None,
        server: socket.socket | None = None,
        give_up: Callable[[], str | None] = lambda: None,
        notice: Callable[[], bool] = lambda: False,
        orders: Callable[[], messages.FromLauncher | None] = lambda: None,
        interpreter: Interpreter | None = None,
    ) -> None:
        self.job, self.rank, self.host = job, rank, host
        self._emit, self._give_up, self._notice, self._orders = emit, give_up, notice, orders
        self._rscript, self._interpreter = rscript, interpreter
        self._environment = dict(environment or {})
        self._log: deque[str] = deque(maxlen=LOG_LINES)
        self._readers: list[threading.Thread] = []
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._state, self._lock = State.MADE, threading.Lock()
        self._oom = OomWatch()
        self._has_reported = threading.Event()
        self._last_words: Failure | None = None
        self._server = server or listen(host)
        self._reservation = reserve(host) if job.needs_tensorflow_server else None
        self.address = address_of(self._server)
        """``host:port`` on which the worker accepts other workers."""
        self.reserved = address_of(self._reservation) if self._reservation else None
        """``host:port`` reserved for TensorFlow's own server, if the job needs one."""
        self._folder = contextlib.ExitStack()
        # Until the worker watches its lifeline, only a janitor can remove the folder.
        swept = swept_folder(find_disk(), f"tfdist-{rank}-")
        self.folder = self._folder.enter_context(swept)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.kill()
        self._server.close()
        if self._reservation is not None:
            self._reservation.close()
        shutil.rmtree(self.folder, ignore_errors=True)
        self._folder.close()
        self._enter(State.CLOSED)

    @property
    def is_closed(self) -> bool:
        return self._state == State.CLOSED

    def _enter(self, state: State, reason: str = "") -> None:
        """Enter a state, and report it; one that another thread has overtaken changes nothing."""
        with self._lock:
            self._check(state)
            before, self._state = self._state, max(self._state, state)
        if state != before or state == State.JOINED:
            late = f", after {before.name.lower()}" if state < before else ""
            name = f"{state.name.lower()}{late}"
            text = f"process {name}{reason and f' ({reason})'}"
            extra = {"rank": self.rank, "host": self.host}
            LOGGER.debug("worker %d on %s: %s", self.rank, self.host, text, extra=extra)
            if state != State.CLOSED:  # it says nothing about the worker
                self._emit(Moment(time.time(), name, reason, self.rank, self.host))

    def _check(self, state: State) -> None:
        if (self._state == State.MADE) != (state == State.STARTED) and state != State.CLOSED:
            raise RuntimeError(f"a child that is {self._state.name} cannot become {state.name}")

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self, contents: Mapping[str, bytes]) -> None:
        """Write the files and start the process, which imports TensorFlow and waits for `go`."""
        self._check(State.STARTED)
        with naming_full_disk(self.folder, "model and job"):
            (self.folder / JOB).write_text(self.job.to_json())
            for name, content in contents.items():
                (self.folder / name).write_bytes(content)
        events_out, events_in = os.pipe()
        descriptors = (self._server.fileno(), events_in)
        try:
            self._process = self._start(descriptors)
        except OSError:  # leaked at the limit of open files
            # (test_a_session_without_free_descriptors_says_so_and_leaks_none)
            os.close(events_out)
            raise
        finally:
            os.close(events_in)
        self._enter(State.STARTED, f"PID {self.pid}")
        # From here only the worker has it open: its peers notice at once when it dies.
        self._server.close()
        assert self._process.stdout is not None
        self._read(os.fdopen(events_out, "rb"), self._pass_on_event)
        self._read(self._process.stdout, self._pass_on_line)

    def go(self, order: messages.FromLauncher) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        if isinstance(order, messages.Order):
            rank = self.rank if order.rank is None else order.rank
            self._enter(State.JOINED, f"rank {rank} of {len(order.peers)}")
        # If it died, its report or exit status has the reason.
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(encode_line(order))
            self._process.stdin.flush()

    def wait(self) -> WorkerReport:
        """Wait for the worker's report; if it ends without one, return a report of the failure."""
        failure = self._wait_for_report()
        for reader in self._readers:
            # Children of the worker may hold its pipes open: a call waited for a `sleep` that its
            # function had started (test_what_a_worker_has_started_ends_with_it).
            reader.join(timeout=1)
        try:
            content = (self.folder / REPORT).read_bytes()
        except OSError:
            failure = self._last_words or failure or self._describe_end(0)
            return WorkerReport(self.rank, self.host, self.pid, failure=failure)
        report = read_report(content, self.rank, self.host)
        if failure := self._last_words or failure:  # the reason why the report is incomplete
            report = replace(report, failure=report.failure and failure)
        if report.failure is None:
            return report
        return replace(report, failure=replace(report.failure, log=tuple(self._log)))

    def _wait_for_report(self) -> Failure | None:
        """Return the failure of a worker without a report; None once it has reported.

        A worker that has reported keeps running until `kill`.
        """
        assert self._process is not None
        watch = StallWatch(self.pid, self.job.timeout)
        memory = MemoryWatch(self.pid, self.job.resources.bytes)
        while not self._has_reported.wait(_LOOK_SECONDS) and not (self.folder / REPORT).exists():
            status = self._process.poll()
            if status is not None:
                self._enter(State.ENDED, _name_status(status))
                signal_group(self.pid, signal.SIGKILL)
                return self._describe_end(status)
            self._oom.look()
            if used := memory.look():
                failure = self._describe_excess(used)
                self._kill_group(failure.message)  # its memory still grows
                return failure
            if reason := watch.look():
                self._kill_group(reason)  # its peers wait until it has ended
                return self._fail("WorkerStalled", reason, _STALL_ADVICE)
            if reason := self._give_up():
                return self._fail("Stopped", reason, "")
            while order := self._orders():
                self.go(order)
            if self._state < State.NOTIFIED and self._notice():
                self._enter(State.NOTIFIED)
                self._process.send_signal(signal.SIGTERM)
        return None

    def kill(self) -> None:
        process = self._process
        if process is None:
            return
        if process.stdin is not None:
            # Its lifeline: it removes its folder and ends its process group. If it were killed from
            # here, and then this process, as Spark does, the folder would remain
            # (test_nothing_outlives_a_driver_that_is_killed, and on Spark
            # test_a_driver_that_dies_leaves_no_worker_and_no_folder).
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if self._state < State.ENDED:  # else its PID may belong to another process
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=2)
            self._kill_group("by its launcher")
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._enter(State.ENDED, _name_status(process.wait(timeout=10)))
        # A daemon that has left the group outlived its worker
        # (test_a_daemon_that_a_function_has_started_ends_with_it).
        end_marked("TMPDIR", str(self.folder))

    def _kill_group(self, reason: str) -> None:
        assert self._process is not None
        self._enter(State.KILLED, reason)
        signal_group(self.pid, signal.SIGKILL)
        self._process.send_signal(signal.SIGKILL)  # it may have been stopped before it had a group

    def model(self) -> tuple[str, bytes] | None:
        """Return the format and content of the trained model's file, or None if there is none."""
        paths = {kind: self.folder / f"trained.{kind}" for kind in TRAINED}
        return next(((kind, p.read_bytes()) for kind, p in paths.items() if p.exists()), None)

    def _start(self, descriptors: Sequence[int]) -> subprocess.Popen[bytes] | ForkedProcess:
        folder, variables = str(self.folder), self._variables()
        if self._rscript is None:
            # A function may change the environment before it imports TensorFlow.
            may_fork = self.job.kind != "run" and self.job.resources.fork_server is not False
            python = self._interpreter.python if self._interpreter else sys.executable
            return start_worker(folder, descriptors, variables, may_fork, python)
        script = self.folder / "worker.R"
        # Copied, because this package may be in an archive.
        script.write_text(files("pybackend.core.r").joinpath("worker.R").read_text())
        return popen([self._rscript, "--vanilla", str(script), folder], descriptors, variables)

    def _variables(self) -> dict[str, str]:
        return {
            **worker_variables(self._interpreter),
            # TensorFlow leaves files behind if its process is killed: removed with the folder.
            "TMPDIR": str(self.folder),
            **self._environment,
            "TFDIST_RANK": str(self.rank),  # elastic training updates it in each generation
            "TFDIST_WORKER": str(self.rank),
            "TFDIST_HOST": self.host,
        }

    def _read(self, pipe: Any, handle: Callable[[bytes], None]) -> None:
        def pump() -> None:
            with pipe:
                for line in pipe:
                    handle(line)

        reader = threading.Thread(target=pump, daemon=True)
        reader.start()
        self._readers.append(reader)

    def _pass_on_event(self, line: bytes) -> None:
        try:
            event = messages.read_event(line)
        except ValueError:  # the process was killed while it wrote this line
            return
        if isinstance(event, messages.Reported):
            self._enter(State.REPORTED)
            self._has_reported.set()
        elif isinstance(event, messages.Failed):  # the worker cannot write its report
            self._last_words = event.failure
            self._enter(State.REPORTED, event.failure.message)
            self._has_reported.set()
        else:
            if isinstance(event, messages.Phase) and not event.lasts:
                self._emit(Moment(time.time(), event.name, "", self.rank, self.host))
            self._emit(messages.sent_by(event, self.rank, self.host))

    def _pass_on_line(self, line: bytes) -> None:
        # The last state of a progress bar.
        states = re.split("[\r\b]+", line.decode(errors="replace").rstrip())
        text = printable(next(filter(None, reversed(states)), ""))[:_LONGEST_LINE]
        if is_noise(text):  # it would displace the worker's own last lines in the log
            return
        self._log.append(text)
        if self.job.reports_lines:
            self._emit(messages.PrintedLine(text, rank=self.rank, host=self.host))

    def _describe_excess(self, used: int) -> Failure:
        limit = show_bytes(self.job.resources.bytes or 0)
        message = (
            f"worker {self.rank} used {show_bytes(used)} of its {limit} "
            f"({setting(resources=call_of('Resources', memory=...))})"
        )
        return self._fail("MemoryExceeded", message, _MEMORY_ADVICE)

    def _describe_end(self, status: int) -> Failure:
        if status == -signal.SIGKILL and self._oom.has_killed():
            message = (
                "the system's OOM killer killed the process: its machine or container was out of "
                "memory"
            )
            return self._fail("OutOfMemory", message, _OOM_ADVICE)
        if status == -signal.SIGTERM:
            may_be_saved = self.job.kind == "train" and not self.job.can_go_on
            return self._fail("Preempted", PREEMPTED, _PREEMPTED_ADVICE if may_be_saved else "")
        if status < 0:
            message = f"the process was {_name_status(status)}"
        else:
            message = f"the process exited with status {status} before it sent a report"
        advice = (
            f"it was killed, or its machine ran out of memory; in the latter case, {_OOM_ADVICE}"
            if status == -signal.SIGKILL
            else "see the last lines that it printed; if there are none, it called exit or quit, "
            "or crashed in compiled code"
        )
        if status == -signal.SIGKILL and self.job.kind == "train" and not self.job.is_elastic:
            advice = f"{advice}; {RESTARTS}"
        return self._fail("ProcessDied", message, advice)

    def _fail(self, exception_type: Kind, message: str, advice: str) -> Failure:
        return Failure(
            self.rank,
            self.host,
            exception_type=exception_type,
            message=message,
            log=tuple(self._log),
            time=time.time(),
            advice=advice,
        )


def _name_status(status: int) -> str:
    """Return how a process ended, such as ``"killed by SIGKILL"``, or ``"status 1"``."""
    return f"status {status}" if status >= 0 else f"killed by {name_signal(-status)}"


def find_disk() -> str | None:
    """Return the parent of the worker's folder, or None for the default."""
    # The default folder for temporary files may be small, or in memory. Spark tells its tasks which
    # folders are configured for its data; a TMPDIR that you set takes precedence.
    folder = os.environ.get("SPARK_LOCAL_DIRS", "").split(",")[0]
    is_usable = folder and "TMPDIR" not in os.environ and os.path.isdir(folder)
    return folder if is_usable else None
