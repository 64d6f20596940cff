"""The ranks of `tfdist run` on one host: starts, output, signals, and the end of all they started.

This file is imported on the ranks' hosts.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Literal, NoReturn

from pybackend.core.errors import ClusterError, Failure
from pybackend.core.job.codec import decode
from pybackend.core.job.messages import Announced, Deliver, Failed
from pybackend.core.launchers import forking as processes
from pybackend.core.launchers.remote.bundle import LIBRARY
from pybackend.core.launchers.script.ranks import TASK, ScriptTask, check_script, check_temporary
from pybackend.core.machine import is_loopback, reached_address
from pybackend.core.machine.processes import list_children, read_main_thread
from pybackend.core.net.meeting_client import MeetingClient
from pybackend.core.net.rendezvous import address_of, reserve
from pybackend.core.net.shared_lines import SharedLines, follow_driver

Stream = Literal["out", "err"]
# Name under which a rank's exit status, or the negated signal number, is announced. Output is
# announced under the name of its stream, as Latin-1 text.
STATUS = "status"
_LONGEST_READ = 65536
_END_SECONDS = 10.0
# Reads that empty a pipe of default size after its process has ended.
_READS_AT_THE_END = 16
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Agent:
    """Process that starts the ranks of a host; their output is forwarded on one thread.

    ``meetings`` are the connections to the driver, one for each rank. ``variables`` are for the
    ranks, in addition to this process's own.
    """

    def __init__(
        self, task: ScriptTask, meetings: Mapping[int, MeetingClient], variables: Mapping[str, str]
    ) -> None:
        self.task, self.meetings = task, meetings
        # R embeds the Python of Python ranks.
        python = os.environ.get("RETICULATE_PYTHON") or sys.executable
        self.variables = {**os.environ, "RETICULATE_PYTHON": python, **variables}
        self._held: list[socket.socket] = []
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self._stopped: set[int] = set()
        self._pipes: dict[int, tuple[int, Stream, IO[bytes]]] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, waking = os.pipe()
        for end in (self._wake, waking):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waking)
        self._selector.register(self._wake, selectors.EVENT_READ, self._look_at_processes)

    def serve(self) -> NoReturn:
        task = self.task
        try:
            check_script(task.script, task.folder)
            check_temporary(task.variables.get("TMPDIR"))
            own = self.reserve()
        except ClusterError as error:
            said = (task.site.name, type(error).__name__, str(error))
            for rank, meeting in self.meetings.items():
                meeting(Failed(Failure(rank, *said)))
        else:
            with ThreadPoolExecutor(len(own)) as threads:
                everyone = list(threads.map(MeetingClient.gather, self.meetings.values(), own))
            self.start(task.addresses or everyone[0] or ())
        while True:
            for key, _ in self._selector.select():
                key.data()

    def reserve(self) -> Sequence[str]:
        """Return the address of each rank; ports are reserved unless the user chose them."""
        site = self.task.site
        if self.task.addresses:
            return [self.task.addresses[rank] for rank in site.ranks]
        if (host := site.address or reached_address()) is None:
            raise ClusterError("SSH_CONNECTION is not set: the agent was not started by ssh")
        if is_loopback(host) and not self.task.is_alone:
            raise ClusterError(
                f"it was reached at {host}, perhaps through a tunnel, where no other host can "
                "reach it: use a name or address that the other hosts can reach"
            )
        self._held = [reserve(host) for _ in site.ranks]
        return list(map(address_of, self._held))

    def start(self, addresses: Sequence[str]) -> None:
        """Start all ranks; ``addresses`` are those of the ranks on all hosts."""
        task = self.task
        command, every = task.script.command(sys.executable), self.variables
        for rank, own in zip(task.site.ranks, task.variables_of(addresses, every), strict=True):
            # If this process is killed, the system ends them.
            self.run(rank, command, {**every, **own}, signal.SIGKILL)
            self.listen(rank)

    def run(
        self, rank: int, words: list[str], variables: Mapping[str, str], orphaned: signal.Signals
    ) -> None:
        """Start a command, and forward its output; ``orphaned`` stops it if this process dies."""
        try:
            process = subprocess.Popen(
                words,
                cwd=self.task.folder,
                env=variables,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                start_new_session=True,
                preexec_fn=processes.when_orphaned(orphaned),
            )
        except OSError as error:
            text = f"cannot start {self.task.script.name}: {error}\n"
            self.forward(rank, "err", text.encode())
            self.end(rank, 127)
            return
        self.processes[rank] = process
        pipes: dict[Stream, IO[bytes] | None] = {"out": process.stdout, "err": process.stderr}
        for stream, pipe in pipes.items():
            assert pipe is not None
            os.set_blocking(pipe.fileno(), False)
            self._pipes[pipe.fileno()] = rank, stream, pipe
            handle = partial(self._pass_on, pipe.fileno())
            self._selector.register(pipe, selectors.EVENT_READ, handle)

    def listen(self, rank: int) -> None:
        def obey() -> None:
            while True:
                order = self.meetings[rank].take_order()
                if isinstance(order, Deliver):
                    self.deliver(rank, signal.Signals(order.signal))

        threading.Thread(target=obey, daemon=True).start()

    def deliver(self, rank: int, number: signal.Signals) -> None:
        if (process := self.processes.get(rank)) is None:
            return
        # Ctrl-C reaches the whole foreground group of a terminal, other signals one process.
        if number == signal.SIGINT:
            processes.signal_group(process.pid, number)
        else:
            process.send_signal(number)

    def _pass_on(self, descriptor: int) -> bool:
        """Forward output; return whether there was any."""
        if descriptor not in self._pipes:  # it was read to its end when its process ended
            return False
        rank, stream, pipe = self._pipes[descriptor]
        try:
            block = os.read(descriptor, _LONGEST_READ)
        except BlockingIOError:
            return False
        self.forward(rank, stream, block)
        if not block:
            self._selector.unregister(descriptor)
            del self._pipes[descriptor]
            pipe.close()
        return bool(block)

    def forward(self, rank: int, stream: Stream, block: bytes) -> None:
        if block:  # an empty one is the end of the stream
            self.meetings[rank](Announced(stream, block.decode("latin-1")))

    def _look_at_processes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._wake, _LONGEST_READ)
        for rank, process in list(self.processes.items()):
            if process.poll() is not None:
                self._drain(rank)
                del self.processes[rank]
                self.end(rank, process.returncode)
            else:
                self._look_whether_stopped(rank, process.pid)
        ranks = {process.pid for process in self.processes.values()}
        processes.reap([pid for pid in list_children() if pid not in ranks])

    def _look_whether_stopped(self, rank: int, pid: int) -> None:
        """Report a rank stopped by a signal, because the others might wait for it forever."""
        # Nothing was printed, and the run seemed to hang (test_a_rank_that_was_stopped_is_named).
        found = read_main_thread(pid)
        is_stopped = found is not None and found[0] == "T"
        if is_stopped and rank not in self._stopped:
            text = f"tfdist: process {pid} was stopped by a signal; `kill -CONT {pid}` resumes it\n"
            self.forward(rank, "err", text.encode())
        (self._stopped.add if is_stopped else self._stopped.discard)(rank)

    def _drain(self, rank: int) -> None:
        # Its descendants may keep its pipes open: do not wait for them.
        for descriptor in [d for d, pipe in self._pipes.items() if pipe[0] == rank]:
            for _ in range(_READS_AT_THE_END):
                if not self._pass_on(descriptor):
                    break

    def end(self, rank: int, status: int) -> None:
        self.meetings[rank](Announced(STATUS, str(status)))

    def kill(self) -> None:
        for process in list(self.processes.values()):
            processes.signal_group(process.pid, signal.SIGKILL)
        processes.end_descendants(_END_SECONDS)

    def leave(self, *_: object) -> NoReturn:
        """Kill the ranks, and end this process; callable on any thread."""
        self.kill()
        os._exit(1)


def run(folder: str, pipe: IO[bytes], channel: int, kind: type[Agent] = Agent) -> None:
    """Start the ranks of this host, and stop them when the driver closes ``pipe``.

    ``folder`` is that of the bundle, ``channel`` the descriptor of the pipe to the driver.
    """
    spared = list_children()  # the process that removes the folder
    # A stopped process would not notice that its input has closed.
    processes.when_orphaned(signal.SIGCONT)()
    guard = processes.when_orphaned(signal.SIGTERM)
    agent = os.fork()
    if agent == 0:
        guard()
        _serve(folder, pipe, channel, kind)
    # Two processes: if one of them is killed, the other ends the descendants of the ranks.
    processes.adopt_orphans()
    _, status = os.waitpid(agent, 0)
    processes.end_descendants(_END_SECONDS, spared)
    if os.WIFSIGNALED(status):
        os.write(2, b"the process that starts the ranks there was killed\n")
    os._exit(1)


def _serve(folder: str, pipe: IO[bytes], channel: int, kind: type[Agent]) -> NoReturn:
    task = decode(Path(folder, TASK).read_bytes(), ScriptTask)
    library, variables = Path(folder, LIBRARY), {}
    if library.exists():  # ranks import the driver's release of this package
        paths = [str(library), os.environ.get("PYTHONPATH", "")]
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    # The pipe's buffer is empty: the driver sends no order before all ranks have met.
    lines = SharedLines(os.fdopen(os.dup(pipe.fileno()), "rb"), os.fdopen(channel, "wb", 0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), pipe.fileno())
    connect = partial(MeetingClient, None, "", patience=0.0)
    meetings = {rank: connect(rank, stream=lines.connect(rank)) for rank in task.site.ranks}
    agent = kind(task, meetings, variables)
    for number in _ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it, also for the ranks
            signal.signal(number, agent.leave)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    processes.adopt_orphans()
    follow_driver(lines, agent.leave)
    agent.serve()
