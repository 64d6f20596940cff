"""The driver's end of the connection to an agent."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

import pybackend
from pybackend.errors import ClusterError
from pybackend.launchers.script.messages import LONGEST_READ, Answer, Order, line_of, read_answer

# The system ends no process that waits for a frozen disk.
_KILL_SECONDS = 5.0
# Not `python -m`: that would let files of the current directory stand in for real modules.
_START = "import sys; sys.path[0] = {!r}; from pybackend.launchers.script.agent import main; main()"


class AgentConnection:
    """An agent that runs behind a command.

    Parameters
    ----------
    host
        The host's name, for messages.
    ranks
        The ranks that run there.
    command
        Starts the agent, or leads to it.
    variables
        The command's environment; None: this process's.
    log
        Gets what the command prints as errors; None: this process's own errors.

    Attributes
    ----------
    is_lost
        Whether the agent is gone.
    outbox
        Has what was sent and is not yet read: to be flushed when the command has room for more.
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
            # Ctrl-C is for the driver, which passes it on.
            start_new_session=True,
        )
        assert self.process.stdin is not None
        self.outbox = InputPipe(self.process.stdin)

    def fileno(self) -> int:
        """The descriptor that becomes readable when the agent has said something."""
        assert self.process.stdout is not None
        return self.process.stdout.fileno()

    def send(self, order: Order) -> None:
        """Send an order; one to an agent that is gone is lost, as `receive` will tell."""
        self.outbox.add(line_of(order))

    def receive(self) -> list[Answer]:
        """What the agent has said, once there is something; sets `is_lost` at the end."""
        block = os.read(self.fileno(), LONGEST_READ)
        self.is_lost = not block
        *lines, self._unread = (self._unread + block).split(b"\n")
        answers = [self.read(line) for line in lines if line]
        return [answer for answer in answers if answer is not None]

    def read(self, line: bytes) -> Answer | None:
        """What a line says; None if it is of no interest."""
        try:
            return read_answer(line)
        except ValueError as error:
            raise ClusterError(
                f"{self.host}: the agent there has said something that makes no sense ({error}): "
                "start again"
            ) from error

    def explain_loss(self) -> str:
        """Why nothing is to be heard of the agent any more."""
        return "the agent that starts the ranks has ended"

    def let_go(self) -> None:
        """Have the agent end all that it has started, and itself; `close` waits for it."""
        self.outbox.close()

    def close(self, deadline: float) -> None:
        """Wait until the agent has ended, not for ever."""
        self.let_go()
        assert self.process.stdout is not None
        # Read on: an agent that cannot write does not see that it shall end.
        while self._is_readable(deadline) and os.read(self.fileno(), LONGEST_READ):
            pass
        self.process.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.1, deadline - time.monotonic()))
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(_KILL_SECONDS)

    def _is_readable(self, deadline: float) -> bool:
        rest = deadline - time.monotonic()
        poller = select.poll()
        poller.register(self, select.POLLIN)
        return rest > 0 and bool(poller.poll(rest * 1000))


def agent_here() -> list[str]:
    """The command that starts an agent on this machine."""
    root = str(Path(pybackend.__file__).parents[1].resolve())
    return [sys.executable, "-c", _START.format(root)]


class InputPipe:
    """The pipe to a command's standard input; writing to it waits for nothing."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._waiting = bytearray()
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """The descriptor that becomes writable when the command has read something."""
        return self._pipe.fileno()

    @property
    def is_empty(self) -> bool:
        """Whether the command's pipe has taken all that was added."""
        return not self._waiting

    def add(self, content: bytes) -> None:
        """Write what there is room for; the rest waits for `flush`."""
        was_empty = self.is_empty
        self._waiting += content
        if was_empty:
            self.flush()

    def flush(self) -> None:
        """Write what there is room for; what nobody will read any more is dropped."""
        try:
            while self._waiting:
                written = os.write(self.fileno(), self._waiting)
                del self._waiting[:written]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._waiting.clear()

    def close(self) -> None:
        """Close the pipe; what waits is dropped."""
        self._waiting.clear()
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
