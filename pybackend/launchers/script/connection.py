"""The driver's end of the connection to an agent, on this machine or over ssh."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import IO

from pybackend.errors import ClusterError
from pybackend.job.codec import encode_line
from pybackend.launchers.hosts.host_list import HostSlots
from pybackend.launchers.hosts.ssh import Ssh, environment
from pybackend.launchers.processes import signal_group
from pybackend.launchers.remote.bootstrap import MARK
from pybackend.launchers.remote.bundle import (
    LIBRARY,
    Bundle,
    bootstrap_command,
    library,
    read_greeting,
)
from pybackend.launchers.script.messages import (
    LONGEST_READ,
    Answer,
    CannotRun,
    Order,
    read_answer,
)

# A process that waits for a frozen disk cannot be killed.
_KILL_SECONDS = 5.0


class AgentConnection:
    """An agent, which is started by a command.

    Parameters
    ----------
    host
        The host's name, for messages.
    ranks
        The ranks that run there.
    command
        Command that starts the agent, possibly over ssh.
    variables
        Environment of the command; None: this process's.
    log
        File for standard error of the command; None: this process's standard error.

    Attributes
    ----------
    is_lost
        True after the agent has disconnected.
    outbox
        Sent data that the command has not read; flush it when the command can read more.
    """

    def __init__(
        self,
        host: str,
        ranks: tuple[int, ...],
        command: Sequence[str],
        variables: Mapping[str, str] | None = None,
        log: IO[bytes] | None = None,
    ) -> None:
        self.host = host
        self.ranks = ranks
        self.is_lost = False
        self._unread = b""
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=variables,
            # Ctrl-C must reach only the driver, which forwards it.
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self.outbox = InputPipe(self.process.stdin)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the agent has sent something."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, order: Order) -> None:
        """Send an order; it is lost if the agent has disconnected, which `receive` detects."""
        self.outbox.add(encode_line(order))

    def receive(self) -> list[Answer]:
        """Wait for messages from the agent, and return them; set `is_lost` at the end."""
        block = os.read(self.fileno(), LONGEST_READ)
        self.is_lost = not block
        *lines, self._unread = (self._unread + block).split(b"\n")
        answers = [self.read(line) for line in lines if line]
        return [answer for answer in answers if answer is not None]

    def read(self, line: bytes) -> Answer | None:
        """Parse a line; None if it can be ignored."""
        try:
            return read_answer(line)
        except ValueError as error:
            raise ClusterError(
                f"{self.host}: the agent there sent an invalid message ({error}): start again"
            ) from error

    def explain_loss(self) -> str:
        """Return why the connection to the agent was lost."""
        return "the agent that starts the ranks ended"

    def let_go(self) -> None:
        """Ask the agent to stop its ranks and exit; `close` waits for that."""
        self.outbox.close()

    def close(self, deadline: float) -> None:
        """Wait until the agent has ended, or the deadline, after which it is killed."""
        self.let_go()
        assert self.process.stdout is not None
        # Continue to read: an agent that blocks on writing would not notice that it should end.
        while self._is_readable(deadline) and os.read(self.fileno(), LONGEST_READ):
            pass
        self.process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.1, deadline - time.monotonic()))
        if self.process.returncode is None:
            signal_group(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_KILL_SECONDS)

    def _is_readable(self, deadline: float) -> bool:
        rest = deadline - time.monotonic()
        poller = select.poll()
        poller.register(self, select.POLLIN)
        return rest > 0 and bool(poller.poll(rest * 1000))


class InputPipe:
    """Pipe to a command's standard input; writing to it never blocks."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        # A host that took nothing in held up Ctrl-C
        # (test_a_host_that_takes_nothing_in_does_not_hold_up_signals).
        self._waiting = bytearray()
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """Return the descriptor that becomes writable when the command has read something."""
        return self._pipe.fileno()

    @property
    def is_empty(self) -> bool:
        """True if all added data has been written to the pipe."""
        return not self._waiting

    def add(self, content: bytes) -> None:
        """Write as much as fits into the pipe; the rest waits for `flush`."""
        was_empty = self.is_empty
        self._waiting += content
        if was_empty:
            self.flush()

    def flush(self) -> None:
        """Write as much as fits into the pipe; drop all data if the reader has closed."""
        try:
            while self._waiting:
                written = os.write(self.fileno(), self._waiting)
                del self._waiting[:written]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._waiting.clear()

    def close(self) -> None:
        """Close the pipe, and drop waiting data."""
        self._waiting.clear()
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()


_LEAST_PYTHON = (3, 11)
_SSH_FAILED = 255
_END_SECONDS = 5.0
_NOT_FOUND = (126, 127)


def agent_there(ssh: Ssh, host: HostSlots, python: str) -> list[str]:
    """Return the command that starts an agent on another host."""
    return ssh.command(host, bootstrap_command(python, "", "script.ssh_task"))


class SshConnection(AgentConnection):
    """An agent on another host, to which this package is sent."""

    def __init__(self, ssh: Ssh, host: HostSlots, ranks: tuple[int, ...], python: str) -> None:
        self._ssh = ssh
        self._slots = host
        self._python = python
        self._has_greeted = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        super().__init__(host.name, ranks, agent_there(ssh, host, python), environment(), self._log)

    def read(self, line: bytes) -> Answer | None:
        """Parse a line, which may come from a login shell or Python before the agent starts."""
        if self._has_greeted:
            return super().read(line)
        if not line.startswith(MARK):
            return None
        self._has_greeted = True
        try:
            greeting = read_greeting(line, "it")
        except ClusterError as error:
            return CannotRun(str(error))
        if greeting.version < _LEAST_PYTHON:
            version = ".".join(map(str, greeting.version))
            return CannotRun(
                f"{greeting.python} is Python {version}, but tfdist needs 3.11 or later: use "
                "--python to specify one that every host has"
            )
        _bundle().send(self.outbox.add)
        return None

    def explain_loss(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has just ended
            self.process.wait(_END_SECONDS)
        status = self.process.returncode
        self._log.seek(0)
        printed = self._log.read().decode(errors="replace").splitlines()
        said = f"; it printed: {printed[-1]}" if printed else ""
        if self._has_greeted:
            return f"the connection to it ended with status {status}{said}"
        if status == _SSH_FAILED:
            return str(self._ssh.explain(self._slots, printed))
        if status in _NOT_FOUND:
            return (
                f"there is no Python at {self._python}: pass --python with a path that exists on "
                "all hosts"
            )
        return f"{self._python} exited there with status {status}{said}"

    def let_go(self) -> None:
        is_reading = self._has_greeted and self.outbox.is_empty
        super().let_go()
        if not is_reading:  # ssh may not notice in time that its input has closed
            self.process.terminate()

    def close(self, deadline: float) -> None:
        super().close(deadline)
        self._log.close()


@cache
def _bundle() -> Bundle:
    # A script may train on the images of this package.
    images = files("pybackend.data").joinpath("mnist_subset.npz").read_bytes()
    return Bundle({**library(), f"{LIBRARY}/pybackend/data/mnist_subset.npz": images})
