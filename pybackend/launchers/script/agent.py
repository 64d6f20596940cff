"""Agent on one host: it starts the ranks, forwards their output, and kills their descendants.

It serves one driver over its standard input and output. When its input closes, the driver has
exited or finished, and the agent ends.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import partial
from typing import IO, Any

from pybackend.errors import ClusterError
from pybackend.job.codec import encode_line
from pybackend.launchers.processes import (
    adopt_orphans,
    end_descendants,
    reap,
    signal_group,
    when_orphaned,
)
from pybackend.launchers.script.messages import (
    LONGEST_READ,
    Answer,
    CannotRun,
    Deliver,
    Ended,
    Prepare,
    Prepared,
    Printed,
    Ready,
    StartRanks,
    Stream,
    check_script,
    check_temporary,
    own_python,
    read_order,
)
from pybackend.launchers.shares import share_of_machine
from pybackend.machine.processes import list_children, read_main_thread
from pybackend.net.rendezvous import address_of, reserve

_END_SECONDS = 10.0
# Reads that empty a pipe of default size after its process has ended.
_READS_AT_THE_END = 16
# The system closes a connection whose data is not acknowledged: this detects a driver's machine
# that crashed.
_BEAT_SECONDS = 10.0
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Agent:
    """Agent that serves the driver over two file descriptors, on one thread.

    ``variables`` are environment variables for the ranks, in addition to this process's own.
    """

    def __init__(self, orders: int, answers: int, variables: Mapping[str, str]) -> None:
        self._variables = variables
        self._orders = orders
        self._answers = answers
        self._unread = b""
        self._is_over = False
        self._prepared: Prepare
        self._held: list[socket.socket] = []
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._stopped: set[int] = set()
        self._pipes: dict[int, tuple[int, Stream, IO[bytes]]] = {}
        self._selector = selectors.DefaultSelector()
        self._wake, waking = os.pipe()
        for end in (self._wake, waking):
            os.set_blocking(end, False)
        signal.set_wakeup_fd(waking)
        self._await(orders, self._read_orders)
        self._await(self._wake, self._look_at_signals)

    def serve(self) -> None:
        """Execute the driver's orders until it disconnects; then stop the ranks and clean up."""
        try:
            self._say(Ready())
            while not self._is_over:
                ready = self._selector.select(_BEAT_SECONDS)
                for key, _ in ready:
                    key.data()
                if not ready:
                    os.write(self._answers, b"\n")
        except OSError:  # the driver no longer reads
            pass
        finally:
            for process in self._processes.values():
                signal_group(process.pid, signal.SIGKILL)
            end_descendants(_END_SECONDS)

    def _await(self, descriptor: int, handle: Callable[[], Any]) -> None:
        self._selector.register(descriptor, selectors.EVENT_READ, handle)

    def _say(self, answer: Answer) -> None:
        rest = memoryview(encode_line(answer))
        while rest:
            rest = rest[os.write(self._answers, rest) :]

    def _read_orders(self) -> None:
        block = os.read(self._orders, LONGEST_READ)
        if not block:
            self._is_over = True
        *lines, self._unread = (self._unread + block).split(b"\n")
        for line in lines:
            order = read_order(line)
            if isinstance(order, Prepare):
                self._prepare(order)
            elif isinstance(order, StartRanks):
                self._start(order)
            else:
                self._deliver(order)

    def _prepare(self, order: Prepare) -> None:
        self._prepared = order
        try:
            check_script(order.script, order.folder)
            check_temporary(order.temporary)
            addresses = self._reserve(order)
        except ClusterError as error:
            self._say(CannotRun(str(error)))
        else:
            self._say(Prepared(addresses))

    def _reserve(self, order: Prepare) -> tuple[str, ...]:
        """Reserve ports and return this host's rank addresses, if the driver requests them."""
        if order.reserves:
            host = order.host or _reached_address()
            self._held = [reserve(host) for _ in order.ranks]
        return tuple(map(address_of, self._held))

    def _start(self, order: StartRanks) -> None:
        own = {**os.environ, **own_python(os.environ, sys.executable), **self._variables}
        for rank, variables in zip(self._prepared.ranks, order.variables, strict=True):
            wanted = {**own, **variables}
            shares = share_of_machine(int(variables["LOCAL_WORLD_SIZE"]), wanted)
            try:
                self._run(
                    rank,
                    self._prepared.script.command(sys.executable, "Rscript"),
                    {**wanted, **shares[int(variables["LOCAL_RANK"])]},
                    # If this agent is killed, the system ends them.
                    signal.SIGKILL,
                )
            except OSError as error:
                text = f"cannot start {self._prepared.script.name}: {error}\n"
                self._say(Printed(rank, "err", text.encode().decode("latin-1")))
                self._say(Ended(rank, 127))

    def _run(
        self, rank: int, words: list[str], variables: dict[str, str], orphaned: signal.Signals
    ) -> None:
        """Start a command, and read its output; ``orphaned`` stops it if this agent dies."""
        process = subprocess.Popen(
            words,
            cwd=self._prepared.folder,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=when_orphaned(orphaned),
        )
        self._processes[rank] = process
        assert process.stdout is not None
        assert process.stderr is not None
        self._follow(rank, "out", process.stdout)
        self._follow(rank, "err", process.stderr)

    def _follow(self, rank: int, stream: Stream, pipe: IO[bytes]) -> None:
        descriptor = pipe.fileno()
        os.set_blocking(descriptor, False)
        self._pipes[descriptor] = rank, stream, pipe
        self._await(descriptor, partial(self._pass_on, descriptor))

    def _pass_on(self, descriptor: int) -> bool:
        """Forward output; return whether there was any."""
        if descriptor not in self._pipes:  # it was read to its end when its process ended
            return False
        rank, stream, pipe = self._pipes[descriptor]
        try:
            block = os.read(descriptor, LONGEST_READ)
        except BlockingIOError:
            return False
        self._print(rank, stream, block)
        if not block:
            self._selector.unregister(descriptor)
            del self._pipes[descriptor]
            pipe.close()
        return bool(block)

    def _print(self, rank: int, stream: Stream, block: bytes) -> None:
        """Forward a block of output; an empty block marks the end."""
        if block:
            self._say(Printed(rank, stream, block.decode("latin-1")))

    def _look_at_signals(self) -> None:
        with contextlib.suppress(BlockingIOError):
            caught = os.read(self._wake, LONGEST_READ)
            self._is_over |= any(number in _ENDING for number in caught)
        for rank, process in list(self._processes.items()):
            if process.poll() is not None:
                self._end(rank, process.returncode)
            else:
                self._look_whether_stopped(rank, process.pid)
        ranks = {process.pid for process in self._processes.values()}
        reap([pid for pid in list_children() if pid not in ranks])

    def _look_whether_stopped(self, rank: int, pid: int) -> None:
        """Report a rank stopped by a signal, because the others might wait for it forever."""
        # Nothing was printed, and the run seemed to hang (test_a_rank_that_was_stopped_is_named).
        found = read_main_thread(pid)
        is_stopped = found is not None and found[0] == "T"
        if is_stopped and rank not in self._stopped:
            text = f"tfdist: process {pid} was stopped by a signal; `kill -CONT {pid}` resumes it\n"
            self._say(Printed(rank, "err", text))
        (self._stopped.add if is_stopped else self._stopped.discard)(rank)

    def _end(self, rank: int, status: int) -> None:
        # Its descendants may keep its pipes open: do not wait for them.
        for descriptor in [d for d, pipe in self._pipes.items() if pipe[0] == rank]:
            for _ in range(_READS_AT_THE_END):
                if not self._pass_on(descriptor):
                    break
        del self._processes[rank]
        self._say_ended(rank, status)

    def _say_ended(self, rank: int, status: int) -> None:
        self._say(Ended(rank, status))

    def _deliver(self, order: Deliver) -> None:
        for process in self._processes.values():
            # Ctrl-C reaches the whole foreground group of a terminal, other signals one process.
            if order.signal in (signal.SIGINT, signal.SIGKILL):
                signal_group(process.pid, order.signal)
            else:
                process.send_signal(order.signal)


def main() -> None:
    """Serve the driver that started this process on its own machine."""
    serve_here(Agent)


def serve_here(kind: type[Agent]) -> None:
    """Run an agent of a given class, for the driver that started this process."""
    orders, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # prints must not mix with messages
    when_orphaned(signal.SIGCONT)()  # a stopped process would not notice that its input has closed
    serve(orders, answers, {}, kind)


def serve(
    orders: int, answers: int, variables: Mapping[str, str], kind: type[Agent] = Agent
) -> None:
    """Serve the driver over two file descriptors."""
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    for number in (*_ENDING, signal.SIGCHLD):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup ignores it, also for the ranks
            signal.signal(number, lambda *_: None)
    adopt_orphans()
    kind(orders, answers, variables).serve()


def _reached_address() -> str:
    """Return the address of this host that ssh used, which the other hosts can use as well."""
    words = os.environ.get("SSH_CONNECTION", "").split()
    if len(words) != 4:
        raise ClusterError("SSH_CONNECTION is not set: the agent was not started by ssh")
    return words[2]
