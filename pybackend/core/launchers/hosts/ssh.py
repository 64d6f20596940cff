"""Hosts that ssh reaches: lists of them with slots, ssh's commands and errors, and their Python."""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import shutil
import subprocess
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import IO, Any

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.arguments import counted, wrong
from pybackend.core.launchers.environment.installing import Interpreter
from pybackend.core.launchers.package_files import package_root
from pybackend.core.launchers.remote.bundle import bootstrap_command
from pybackend.core.words import setting, show

# A name never begins with "-", because it is used on command lines.
_ENTRY = re.compile(
    r"(?:(?P<user>[^-@:\s\[\]][^@:\s\[\]]*)@)?"
    r"(?:\[(?P<address>[0-9A-Fa-f:.]+(?:%\w+)?)\]|(?P<name>\w[\w.-]*))"
    r"(?::(?P<slots>\d+))?"
)
_MOST_SLOTS = 1024
_FORM = 'expected "name", "name:slots", "user@name:slots" or "[IPv6 address]:slots"'
_IF_PORT = (
    "If this is a port: ssh's port goes into ssh_options, and all other ports are chosen "
    "automatically"
)


@dataclass(frozen=True)
class HostSlots:
    """A host and its number of slots. ``user`` is the user to log in as; None: ssh's default.

    If several jobs run there at once, ``neighbours`` is the number of workers of all of them, and
    ``first`` the number of the first of these slots.
    """

    name: str
    slots: int = 1
    user: str | None = None
    first: int = 0
    neighbours: int | None = None

    @property
    def login(self) -> str:
        return f"{self.user}@{self.name}" if self.user else self.name


def parse_hosts(given: str | Sequence[str]) -> tuple[HostSlots, ...]:
    """Read a list of hosts, in order: ``"a:2,b:2"``, or a sequence of such texts.

    An entry is ``name``, ``name:slots`` or ``user@name:slots``, with one slot by default; an IPv6
    address must be in brackets. A host that is listed twice has the slots of both. Raises
    `InputError`.
    """
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise wrong("hosts", f"a string like {show('a:2,b:2')}, or a list of them", given)
    entries = [entry.strip() for text in texts for entry in text.split(",")]
    if not any(entries):
        raise InputError(f'`hosts` contains no host: {_FORM}, e.g. "a:2,b:2"')
    return _merge(_parse_entry(entry, "`hosts`") for entry in entries)


def read_hostfile(path: str | os.PathLike[str]) -> tuple[HostSlots, ...]:
    """Read a hostfile in the format of Horovod and Open MPI.

    A line is ``host slots=2`` or ``host:2``; other settings and text after ``#`` are ignored.
    Raises `InputError`.
    """
    name = show(str(path))
    try:
        lines = Path(path).expanduser().read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read the hostfile {name}: {error}") from error
    listed = {number: line.partition("#")[0].split() for number, line in enumerate(lines, 1)}
    found = [_parse_line(words, f"line {n} of {name}") for n, words in listed.items() if words]
    if not found:
        raise InputError(f'the hostfile {name} lists no hosts: expected lines "host slots=2"')
    return _merge(found)


def divide_slots(hosts: Sequence[HostSlots], workers: int, jobs: int) -> list[list[HostSlots]]:
    """Divide the slots of hosts among jobs with this number of workers each, in order."""
    slots = [replace(host, first=one) for host in hosts for one in range(host.slots)]
    parts = [slots[job * workers : (job + 1) * workers] for job in range(jobs)]
    used = Counter((slot.user, slot.name) for part in parts for slot in part)
    divided = []
    for part in parts:
        own = Counter((slot.user, slot.name) for slot in part)
        first = {(slot.user, slot.name): slot for slot in reversed(part)}
        divided.append([replace(first[k], slots=n, neighbours=used[k]) for k, n in own.items()])
    return divided


def ranks_by_host(hosts: Sequence[HostSlots], workers: int) -> list[tuple[HostSlots, range]]:
    """Assign ranks to the slots of hosts, in order. Hosts without ranks are left out.

    Raises `InputError` if there are fewer slots than workers.
    """
    slots = sum(host.slots for host in hosts)
    if workers > slots:
        listed = ",".join(f"{host.login}:{host.slots}" for host in hosts)
        raise InputError(
            f"`workers` is {workers}, but {listed} has {counted(slots, 'slot')}: use at most "
            f"{slots}, or give hosts more slots (one for each GPU, or for each few cores)"
        )
    ends = list(accumulate(host.slots for host in hosts))
    placed = [(one, end - one.slots, end) for one, end in zip(hosts, ends, strict=True)]
    return [(one, range(first, min(end, workers))) for one, first, end in placed if first < workers]


def _parse_line(words: Sequence[str], where: str) -> HostSlots:
    host = _parse_entry(words[0], where)
    for word in words[1:]:
        key, _, value = word.partition("=")
        if key == "slots":
            host = replace(host, slots=_count(value, word, where))
    return host


def _parse_entry(entry: str, where: str) -> HostSlots:
    found = _ENTRY.fullmatch(entry)
    if found is None:
        hint = "" if entry.count(":") < 2 else "; an IPv6 address must be in brackets"
        raise InputError(f"{where}: {show(entry)} is not a host: {_FORM}{hint}")
    slots = _count(found["slots"] or "1", entry, where)
    return HostSlots(found["address"] or found["name"], slots, found["user"])


def _count(text: str, entry: str, where: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"{where}: {show(entry)} must have a whole number of slots, 1 or more")
    if int(text) > _MOST_SLOTS:
        asked = f"{show(entry)} asks for {text} workers on one host"
        raise InputError(f"{where}: {asked}. {_IF_PORT}")
    return int(text)


def _merge(hosts: Iterable[HostSlots]) -> tuple[HostSlots, ...]:
    merged: dict[str, HostSlots] = {}
    for host in hosts:
        known = merged.get(host.login, replace(host, slots=0))
        merged[host.login] = replace(known, slots=known.slots + host.slots)
    return tuple(merged.values())


# Options that your settings cannot change: ssh uses the first of two values.
_FIXED = ["BatchMode=yes", "ClearAllForwardings=yes", "RemoteCommand=none", "PermitLocalCommand=no"]
# An existing shared connection is used; one opened here is not shared.
_FIXED += ["ControlMaster=no"]
# A host that disappears is noticed after 15 seconds.
_DEFAULTS = ("ConnectTimeout=10", "ServerAliveInterval=5", "ServerAliveCountMax=3")
_NAME_SECONDS = 10.0
# ssh's exit status if it lost the connection, or if a signal killed its command; it prints a
# message only in the first case.
CONNECTION_LOST = 255
# Messages of ssh, with advice.
_ADVICE = {
    r"Could not resolve hostname": (
        "Check the spelling of the name, and that this machine can resolve it (/etc/hosts, or a "
        "`HostName` in ~/.ssh/config)"
    ),
    r"Connection refused": "Start its ssh server, or specify its port: {port}",
    r"timed out|No route to host|Network is unreachable": (
        "Check that the host is running, and that no firewall blocks it"
    ),
    r"IDENTIFICATION HAS CHANGED": (
        "The host's key differs from that in ~/.ssh/known_hosts: if you know why, remove that "
        "line with `ssh-keygen -R`, and log in once manually"
    ),
    r"Host key verification failed": (
        "This machine does not know the host's key: log in once manually and accept it, or add it "
        "to ~/.ssh/known_hosts"
    ),
    r"Too many authentication failures": "Specify the key: {key}",
    r"Permission denied": (
        "A password cannot be entered here: copy a key there with `ssh-copy-id`, or start "
        "ssh-agent if the key has a passphrase"
    ),
    r"Connection (closed|reset) by": (
        "See the log of its ssh server: it may allow other users or addresses only"
    ),
}


@dataclass(frozen=True)
class Ssh:
    options: tuple[str, ...] = ()

    def command(self, host: HostSlots, remote: Sequence[str]) -> list[str]:
        fixed, defaults = ([f"-o{option}" for option in each] for each in (_FIXED, _DEFAULTS))
        options = ["-T", "-x", *fixed, *self.options, *defaults]
        # The command replaces the login shell there.
        return [_program(), *options, host.login, f"exec {shlex.join(remote)}"]

    def address(self, host: HostSlots) -> str:
        """Return the name or address that ssh uses for a host; its configuration may set one."""
        command = [_program(), "-G", *self.options, host.login]
        how: Any = {"capture_output": True, "text": True, "stdin": subprocess.DEVNULL}
        shown = subprocess.run(command, timeout=_NAME_SECONDS, **how)
        if found := re.search(r"^hostname (\S+)$", shown.stdout, re.MULTILINE):
            return str(found[1])
        raise ClusterError(
            f"ssh does not accept its settings for {host.name}: {shown.stderr.strip()}. "
            "Correct `ssh_options`, or ~/.ssh/config"
        )

    def explain(self, host: HostSlots, printed: Sequence[str]) -> ClusterError:
        """Return the error for ssh's exit status 255, based on the last lines that ssh printed."""
        text = "\n".join(printed)
        found = (advice for pattern, advice in _ADVICE.items() if re.search(pattern, text))
        advice = next(found, "").format(
            port=setting(ssh_options=["-p", "2222"]),
            key=setting(ssh_options=["-i", "~/.ssh/id_ed25519", "-o", "IdentitiesOnly=yes"]),
        )
        by_hand = shlex.join(["ssh", *self.options, host.login, "true"])
        said = printed[-1].strip() if printed else "nothing"
        reason = f"cannot reach {host.name} over ssh, which reports: {said}"
        last = f"Once `{by_hand}` works without a prompt, this will work too"
        return ClusterError(". ".join(filter(None, (reason, advice, last))))


def environment() -> dict[str, str]:
    # ssh would ask for a password with a window.
    variables = {k: v for k, v in os.environ.items() if k not in ("SSH_ASKPASS", "DISPLAY")}
    return {**variables, "SSH_ASKPASS_REQUIRE": "never"}


@dataclass(frozen=True)
class HostPython:
    """The Python of a host. Without ``ssh``, the host is this machine.

    ``temporary`` is the folder for temporary files there (None: the host's default).
    ``interpreter`` is the Python of an environment that was unpacked there; it replaces ``python``.
    """

    ssh: Ssh | None
    host: HostSlots
    python: str
    temporary: str | None = None
    interpreter: Interpreter | None = None

    @property
    def path(self) -> str:
        return self.python if self.interpreter is None else self.interpreter.python

    def command(self, wanted: str, task: str) -> list[str]:
        start = [] if self.interpreter is None else self.interpreter.start()
        prefix = [] if self.temporary is None else ["env", f"TMPDIR={self.temporary}"]
        if self.ssh is None:  # the bundle need not contain this package
            return [*prefix, *start, *bootstrap_command(self.path, wanted, task, package_root())]
        program = bootstrap_command(self.path, wanted, task)
        return self.ssh.command(self.host, [*prefix, *start, *program])

    def start(
        self, wanted: str, task: str, errors: int = subprocess.PIPE
    ) -> subprocess.Popen[bytes]:
        """Start the process that receives a bundle there; arguments as in `bootstrap_command`."""
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": errors}
        command, variables = self.command(wanted, task), None if self.ssh is None else environment()
        # Without a terminal it never prompts, and Ctrl-C does not end it before its workers.
        return subprocess.Popen(command, **pipes, bufsize=0, env=variables, start_new_session=True)


class HostProcess:
    """A process on a host, which ends and removes its files when its input closes."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        assert process.stdin is not None
        self._input = process.stdin

    def let_go(self) -> None:
        with contextlib.suppress(OSError):
            self._input.close()

    @contextlib.contextmanager
    def _reading(self, pipe: Any) -> Iterator[IO[bytes]]:
        """Read a pipe in this block. If the process ends, so does the block, without an error."""
        with contextlib.suppress(OSError, ValueError), io.BufferedReader(pipe) as reading:
            yield reading

    def wait(self, seconds: float) -> None:
        """Wait for its end, and kill it if its host does not respond."""
        try:
            self._process.wait(max(0.1, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def end_all(processes: Sequence[HostProcess], seconds: float) -> None:
    """End processes on hosts. ``seconds`` is the limit for all of them together."""
    for one in processes:
        one.let_go()
    deadline = time.monotonic() + seconds
    for one in processes:
        one.wait(deadline - time.monotonic())


# A file of a call's bundle, with the `Keeper` whose fork server its workers use.
KEEPER = "keeper.json"


def _program() -> str:
    if found := shutil.which("ssh"):
        return found
    raise ClusterError(
        "this machine has no `ssh`, which starts workers on hosts: install OpenSSH's client "
        "(Debian: apt-get install openssh-client)"
    )
