"""One start of a worker group: its agents, its ranks, and how they end."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from pybackend.errors import ClusterError
from pybackend.launchers.script.connection import AgentConnection, InputPipe
from pybackend.launchers.script.messages import (
    Answer,
    CannotRun,
    Deliver,
    Ended,
    Prepare,
    Prepared,
    Printed,
    Ready,
    StartRanks,
)
from pybackend.launchers.script.output import ScriptOutput
from pybackend.launchers.script.plan import HostRanks, ScriptRun, choose_secret, variables_of
from pybackend.machine.identity import is_loopback
from pybackend.net.rendezvous import split_address

_PREPARE_SECONDS = 60.0
# Time limit after SIGKILL: a process that waits for a frozen disk cannot be killed.
_KILL_SECONDS = 10.0
# Time limit for an agent to end the descendants of its ranks, and itself.
_END_SECONDS = 15.0
# `timeout` signals its child, then its group, which contains the child.
_SAME_SECONDS = 1.0
ENDING = (signal.SIGINT, signal.SIGTERM)
_FORWARDED = (*ENDING, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


@dataclass(frozen=True)
class Fault:
    """First rank that failed: its exit status, or the negated signal number.

    ``status`` is None if the rank was lost with its agent; ``loss`` is then the reason.
    """

    rank: int
    host: str
    status: int | None
    loss: str = ""


@dataclass(frozen=True)
class GroupEnd:
    """End of a worker group: the first failure, and any signal with which the user ended it.

    ``has_begun`` is True if the ranks had been started by then.
    """

    fault: Fault | None
    caught: signal.Signals | None = None
    has_begun: bool = True


class ScriptGroup:
    """The ranks of one start, on their agents."""

    def __init__(
        self, plan: ScriptRun, restart: int, output: ScriptOutput, signals: CaughtSignals
    ) -> None:
        self._plan = plan
        self._restart = restart
        self._output = output
        self._signals = signals
        self._fault: Fault | None = None
        self._caught: signal.Signals | None = None
        self._caught_at = 0.0
        self._deadline = float("inf")
        self._was_killed = False
        self._connections: list[AgentConnection] = []
        self._running: dict[AgentConnection, set[int]] = {}

    def run(self) -> GroupEnd:
        """Start all ranks, and wait until they have ended.

        Raises
        ------
        ClusterError
            A host cannot run the script.
        """
        with self._connected() as connections:
            addresses = self._prepare(connections)
            if has_begun := self._caught is None:
                self._start(connections, addresses)
                self._watch(connections)
        return GroupEnd(self._fault, self._caught, has_begun)

    @contextmanager
    def _connected(self) -> Iterator[list[AgentConnection]]:
        connections = self._connections
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._signals, selectors.EVENT_READ)
        try:
            for site in self._plan.sites:
                connections.append(site.connect())
                self._selector.register(connections[-1], selectors.EVENT_READ)
            yield connections
        finally:
            self._selector.close()
            for connection in connections:
                connection.let_go()
            deadline = time.monotonic() + _END_SECONDS
            for connection in connections:
                connection.close(deadline)

    def _prepare(self, connections: Sequence[AgentConnection]) -> tuple[str, ...]:
        """Have all agents check the script and reserve ports; return the addresses by rank."""
        orders = {c: self._order(s) for c, s in zip(connections, self._plan.sites, strict=True)}
        addresses: dict[int, str] = {}
        waiting = set(connections)
        self._deadline = time.monotonic() + _PREPARE_SECONDS
        while waiting and self._caught is None:
            for connection, answer in self._next():
                if isinstance(answer, Ready):
                    connection.send(orders[connection])
                elif isinstance(answer, Prepared):
                    addresses |= zip(connection.ranks, answer.addresses, strict=False)
                    waiting.discard(connection)
                else:
                    raise ClusterError(f"{connection.host}: {_why(connection, answer)}")
            if time.monotonic() >= self._deadline:
                missing = ", ".join(sorted(one.host for one in waiting))
                raise ClusterError(
                    f"no response from {missing} within {_PREPARE_SECONDS:g} s: check whether you "
                    "can log in there manually"
                )
        found = self._plan.addresses or tuple(addresses[rank] for rank in sorted(addresses))
        if self._caught is None:
            _check_reachable(connections, found)
        return found

    def _order(self, site: HostRanks) -> Prepare:
        plan = self._plan
        temporary = plan.variables.get("TMPDIR")
        return Prepare(
            plan.script, plan.folder, site.ranks, not plan.addresses, site.address, temporary
        )

    def _start(self, connections: Sequence[AgentConnection], addresses: Sequence[str]) -> None:
        secret = choose_secret(self._plan)
        for site, connection in zip(self._plan.sites, connections, strict=True):
            variables = variables_of(self._plan, site, addresses, secret, self._restart)
            connection.send(StartRanks(variables))

    def _watch(self, connections: Sequence[AgentConnection]) -> None:
        """Wait until all ranks have ended, or cannot be killed."""
        self._deadline = float("inf")
        self._running = {c: set(c.ranks) for c in connections}
        while any(self._running.values()):
            for connection, answer in self._next():
                if isinstance(answer, Printed):
                    content = answer.text.encode("latin-1")
                    self._output.write(answer.rank, answer.stream, content)
                elif isinstance(answer, Ended):
                    self._end(connection, answer.rank, answer.status)
                elif answer is None:
                    for rank in sorted(self._running[connection]):
                        self._end(connection, rank, None)
            if time.monotonic() >= self._deadline:
                if self._was_killed:
                    return self._give_up()
                self._kill()

    def _next(self) -> Iterator[tuple[AgentConnection, Answer | None]]:
        """Yield the next messages from agents, None for a lost agent; forward signals meanwhile."""
        self._await_room()
        rest = self._deadline - time.monotonic()
        for key, _ in self._selector.select(None if rest == float("inf") else max(0.0, rest)):
            if isinstance(key.fileobj, InputPipe):
                key.fileobj.flush()
            elif isinstance(key.fileobj, AgentConnection):
                connection = key.fileobj
                yield from ((connection, answer) for answer in connection.receive())
                if connection.is_lost:
                    self._selector.unregister(connection)
                    yield connection, None
        for number in self._signals.take():
            self._pass_on(number)

    def _await_room(self) -> None:
        """Register agents that have not read all orders with the selector."""
        for connection in self._connections:
            outbox = connection.outbox
            is_awaited = outbox in self._selector.get_map()
            if is_awaited and outbox.is_empty:
                self._selector.unregister(outbox)
            elif not is_awaited and not outbox.is_empty:
                self._selector.register(outbox, selectors.EVENT_WRITE)

    def _pass_on(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if number in ENDING and self._caught in ENDING:
            if now > self._caught_at + _SAME_SECONDS:
                self._kill()
            return
        if number in ENDING or (number == signal.SIGHUP and self._caught is None):
            self._caught, self._caught_at = number, now
        if number in ENDING:
            self._deadline = min(self._deadline, now + self._plan.grace)
        self._deliver(number)

    def _end(self, connection: AgentConnection, rank: int, status: int | None) -> None:
        self._running[connection].discard(rank)
        if status == 0 or self._fault is not None:
            return
        loss = connection.explain_loss() if status is None else ""
        self._fault = Fault(rank, connection.host, status, loss)
        if self._deadline == float("inf"):
            self._deadline = time.monotonic() + self._plan.grace
            self._deliver(signal.SIGTERM)

    def _kill(self) -> None:
        self._was_killed = True
        self._deadline = time.monotonic() + _KILL_SECONDS
        self._deliver(signal.SIGKILL)

    def _give_up(self) -> None:
        for connection, ranks in self._running.items():
            for rank in sorted(ranks):
                self._fault = self._fault or Fault(rank, connection.host, -signal.SIGKILL)

    def _deliver(self, number: int) -> None:
        for connection in self._running:
            connection.send(Deliver(number))


def _check_reachable(connections: Sequence[AgentConnection], addresses: Sequence[str]) -> None:
    """Check that hosts can reach each other at the addresses that ssh used."""
    for connection in connections:
        hosts = {split_address(addresses[rank])[0] for rank in connection.ranks if addresses}
        if len(connections) > 1 and any(map(is_loopback, hosts)):
            raise ClusterError(
                f"{connection.host} was reached at {hosts.pop()}, perhaps through a tunnel, where "
                "no other host can reach it: use a name or address that the other hosts can reach"
            )


def _why(connection: AgentConnection, answer: Answer | None) -> str:
    return answer.reason if isinstance(answer, CannotRun) else connection.explain_loss()


class CaughtSignals:
    """Context in which signals are queued for forwarding, instead of acting on this process.

    Signals that were ignored before (by nohup, or a shell's background job) stay ignored.
    """

    def __enter__(self) -> CaughtSignals:
        self._reading, self._writing = os.pipe()
        for end in (self._reading, self._writing):
            os.set_blocking(end, False)
        self._wakeup = signal.set_wakeup_fd(self._writing)
        self._handlers: dict[signal.Signals, Any] = {
            number: signal.signal(number, lambda *_: None)
            for number in _FORWARDED
            if signal.getsignal(number) != signal.SIG_IGN
        }
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._reading)
        os.close(self._writing)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when a signal has arrived."""
        return self._reading

    def take(self) -> list[signal.Signals]:
        """Return the signals that have arrived since the last call."""
        with contextlib.suppress(BlockingIOError):
            return [signal.Signals(number) for number in os.read(self._reading, 4096)]
        return []
