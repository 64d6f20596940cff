"""Driver's end of the connection to an agent on another host, by ssh."""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
from functools import cache
from importlib.resources import files

from pybackend.errors import ClusterError
from pybackend.launchers.hosts.host_list import HostSlots
from pybackend.launchers.hosts.ssh import Ssh, environment
from pybackend.launchers.remote.bootstrap import MARK
from pybackend.launchers.remote.bundle import LIBRARY, Bundle, bootstrap_command, library
from pybackend.launchers.remote.greeting import read_greeting
from pybackend.launchers.script.connection import AgentConnection
from pybackend.launchers.script.messages import Answer, CannotRun

_LEAST_PYTHON = (3, 10)
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
                f"{greeting.python} is Python {version}, and tfdist needs 3.10 or later: use "
                "--python to name one that every host has"
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
                f"there is no Python at {self._python}: name one that all hosts have with --python"
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
