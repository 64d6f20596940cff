"""Commands over ssh, explanations of its errors, and the Python of a host."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO

from pybackend.core.errors import ClusterError
from pybackend.core.launchers.environment.installing import Interpreter
from pybackend.core.launchers.hosts.host_list import HostSlots
from pybackend.core.launchers.package_files import package_root
from pybackend.core.launchers.remote.bootstrap import MARK
from pybackend.core.launchers.remote.bundle import bootstrap_command
from pybackend.core.words import setting

# Options that your settings cannot change: ssh uses the first of two values.
_FIXED = (
    "BatchMode=yes",
    # An existing shared connection is used; one opened here is not shared.
    "ControlMaster=no",
    "ClearAllForwardings=yes",
    "RemoteCommand=none",
    "PermitLocalCommand=no",
)
_DEFAULTS = (
    "ConnectTimeout=10",
    # A host that disappears is noticed after 15 seconds.
    "ServerAliveInterval=5",
    "ServerAliveCountMax=3",
)
_NAME_SECONDS = 10.0
# ssh's exit status if it lost the connection, or if a signal killed its command; it prints a
# message only in the first case.
CONNECTION_LOST = 255
# Messages of ssh, with advice.
_ADVICE = (
    (
        r"Could not resolve hostname",
        "Check the spelling of the name, and that this machine can resolve it (/etc/hosts, or a "
        "`HostName` in ~/.ssh/config)",
    ),
    (
        r"Connection refused",
        "Start its ssh server, or specify its port: {port}",
    ),
    (
        r"timed out|No route to host|Network is unreachable",
        "Check that the host is running, and that no firewall blocks it",
    ),
    (
        r"IDENTIFICATION HAS CHANGED",
        "The host's key differs from that in ~/.ssh/known_hosts: if you know why, remove that "
        "line with `ssh-keygen -R`, and log in once manually",
    ),
    (
        r"Host key verification failed",
        "This machine does not know the host's key: log in once manually and accept it, or add it "
        "to ~/.ssh/known_hosts",
    ),
    (
        r"Too many authentication failures",
        "Specify the key: {key}",
    ),
    (
        r"Permission denied",
        "A password cannot be entered here: copy a key there with `ssh-copy-id`, or start "
        "ssh-agent if the key has a passphrase",
    ),
    (
        r"Connection (closed|reset) by",
        "See the log of its ssh server: it may allow other users or addresses only",
    ),
)


@dataclass(frozen=True)
class Ssh:
    """ssh with the options that the user passed for its command line."""

    options: tuple[str, ...] = ()

    def command(self, host: HostSlots, remote: Sequence[str]) -> list[str]:
        """Return the command line that runs a command on a host, without a terminal."""
        fixed = [word for option in _FIXED for word in ("-o", option)]
        defaults = [word for option in _DEFAULTS for word in ("-o", option)]
        options = ["-T", "-x", *fixed, *self.options, *defaults]
        # The command replaces the login shell there.
        return [_program(), *options, host.login, f"exec {shlex.join(remote)}"]

    def address(self, host: HostSlots) -> str:
        """Return the name or address that ssh uses for a host; its configuration may set one."""
        command = [_program(), "-G", *self.options, host.login]
        shown = subprocess.run(
            command, capture_output=True, text=True, timeout=_NAME_SECONDS, stdin=subprocess.DEVNULL
        )
        found = re.search(r"^hostname (\S+)$", shown.stdout, re.MULTILINE)
        if found is None:
            raise ClusterError(
                f"ssh does not accept its settings for {host.name}: {shown.stderr.strip()}. "
                "Correct `ssh_options`, or ~/.ssh/config"
            )
        return found[1]

    def explain(self, host: HostSlots, printed: Sequence[str]) -> ClusterError:
        """Return the error for ssh exit status 255, based on the last lines that ssh printed."""
        text = "\n".join(printed)
        advice = next((advice for pattern, advice in _ADVICE if re.search(pattern, text)), "")
        advice = advice.format(
            port=setting(ssh_options=["-p", "2222"]),
            key=setting(ssh_options=["-i", "~/.ssh/id_ed25519", "-o", "IdentitiesOnly=yes"]),
        )
        by_hand = shlex.join(["ssh", *self.options, host.login, "true"])
        said = printed[-1].strip() if printed else "nothing"
        return ClusterError(
            f"cannot reach {host.name} over ssh, which "
            f"reports: {said}. {advice + '. ' if advice else ''}Once `{by_hand}` works without a "
            "prompt, this will work too"
        )


def environment() -> dict[str, str]:
    """Return the variables for ssh, without programs that would ask for a password."""
    variables = {k: v for k, v in os.environ.items() if k not in ("SSH_ASKPASS", "DISPLAY")}
    return {**variables, "SSH_ASKPASS_REQUIRE": "never"}


@dataclass(frozen=True)
class HostPython:
    """The Python of a host.

    Attributes
    ----------
    ssh, host, python
        The `Ssh` object, the host, and the path of the host's Python. Without `Ssh`, the host is
        this machine.
    temporary
        Folder for temporary files on the host; None: the host's default.
    interpreter
        The Python of an environment that was unpacked there, instead of ``python``.
    """

    ssh: Ssh | None
    host: HostSlots
    python: str
    temporary: str | None = None
    interpreter: Interpreter | None = None

    @property
    def path(self) -> str:
        """Path of the Python that is used."""
        return self.python if self.interpreter is None else self.interpreter.python

    def command(self, wanted: str, task: str) -> list[str]:
        """Return the command that receives a bundle there; arguments as in `bootstrap_command`."""
        start = [] if self.interpreter is None else self.interpreter.start()
        place = [] if self.temporary is None else ["env", f"TMPDIR={self.temporary}"]
        if self.ssh is None:  # the bundle need not contain this package
            return [*place, *start, *bootstrap_command(self.path, wanted, task, package_root())]
        program = bootstrap_command(self.path, wanted, task)
        return self.ssh.command(self.host, [*place, *start, *program])

    def start(
        self, wanted: str, task: str, errors: int = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        """Start the process that receives a bundle there; its input and output are pipes.

        ``wanted`` and ``task`` are as in `bootstrap_command`; ``errors`` receives its error output.
        """
        return subprocess.Popen(
            self.command(wanted, task),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,
            env=None if self.ssh is None else environment(),
            # Without a terminal it never prompts, and Ctrl-C does not end it before its workers.
            start_new_session=True,
        )


class HostProcess:
    """A process on a host, which ends and removes its files when its input closes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def let_go(self) -> None:
        """Close its input."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, or its host does not respond."""
        try:
            self._process.wait(max(0.1, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def end_all(processes: Sequence[HostProcess], seconds: float) -> None:
    """End processes on hosts, and wait up to some seconds for all of them."""
    for one in processes:
        one.let_go()
    deadline = time.monotonic() + seconds
    for one in processes:
        one.wait(deadline - time.monotonic())


def find_greeting(reading: IO[bytes]) -> bytes | None:
    """Return the line that `bootstrap` printed, after a login shell's output; None if missing."""
    return next((line for line in reading if line.startswith(MARK)), None)


def _program() -> str:
    found = shutil.which("ssh")
    if found is None:
        raise ClusterError(
            "this machine has no `ssh`, which starts workers on hosts: install OpenSSH's client "
            "(Debian: apt-get install openssh-client)"
        )
    return found
