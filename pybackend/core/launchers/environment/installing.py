"""Unpack an environment on a host, once, and find its Python; serve the archive from the driver.

This file is imported on the workers' hosts.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pybackend.core.errors import ClusterError
from pybackend.core.launchers.environment.archive import PackedEnvironment
from pybackend.core.launchers.environment.contents import LIBRARIES
from pybackend.core.launchers.remote.bootstrap import MARK
from pybackend.core.launchers.remote.bundle import find_greeting, read_blocks
from pybackend.core.net.authentication import RejectedError, new_token
from pybackend.core.net.rendezvous import Acceptor, address_of, connect, listen
from pybackend.core.net.stream import Stream
from pybackend.core.words import either

# tar prints these after the lines with the reasons. A full disk was reported as "Exiting with
# failure status due to previous errors" (test_a_full_disk_of_a_host_is_named).
_AFTER_REASONS = ("Exiting with failure", "Error is not recoverable", "Child returned status")

# A shell script, since a host may have no Python. Its arguments are the folder for environments
# ("-": that of the user's caches), the environment's name, and the release of Python. It prints
# whether the environment is there, the machine, its C library, and the path; then it reads the
# archive. The name is a link, which appears when everything is in place. Environments that were not
# used for a month are removed.
#
# - `mine`: another user may have made the name where the folder is shared; its code is not run.
# - `whole`: cleaners of scratch disks delete single files, which made each later call fail with a
#   missing module. Such an environment is unpacked again; others may still use the damaged one.
# - `.unpacking` names the shell that unpacks, the boot and the PID namespace: the copy of a killed
#   shell stayed for a month. The copy of another machine may still grow; it stays for a day.
INSTALL = r"""
umask 077
root=$0; [ "$root" != - ] || root=${XDG_CACHE_HOME:-$HOME/.cache}/tfdist/environments
me=$(id -u); place=$root/$1; state=need
mine() { [ -z "$(find "$1" "$1/" -maxdepth 0 ! -user "$me" 2>/dev/null)" ]; }
list() { xargs -0 stat -c %s <.files 2>/dev/null | cksum; }
whole() { [ -e "$1/bin/python" ] && (cd "$1" && [ "$(list)" = "$(cat .sizes)" ]) 2>/dev/null; }
mine "$place" || place=$place-$me
mine "$place" || { echo "$place belongs to another user" >&2; exit 1; }
if whole "$place"; then state=have; touch "$place/.used"; fi
libc=$(getconf GNU_LIBC_VERSION 2>/dev/null) || libc=unknown
printf '\ntfdist %s|%s|%s|%s\n' "$state" "$(uname -m)" "$libc" "$place"
[ "$state" = need ] || exit 0
exec 1>&2
mkdir -p "$root" || exit 1
find "$root" -mindepth 2 -maxdepth 2 -path '*/tfdist-environment-*/.used' -mtime +30 2>/dev/null |
while read -r old; do
  rm -rf "${old%/.used}"
done
here=$(cat /proc/sys/kernel/random/boot_id; readlink /proc/self/ns/pid); here=$(echo $here)
for mark in "$root"/tfdist-environment-*/.unpacking; do
  { read -r pid where <"$mark"; } 2>/dev/null || continue
  if [ "$where" = "$here" ]; then [ ! -d "/proc/$pid" ]
  else [ -n "$(find "$mark" -mtime +0)" ]; fi || continue
  [ ! -e "$mark" ] || rm -rf "${mark%/*}"  # it is removed first when all is in place
done
made=$(mktemp -d "$place.XXXXXX") || exit 1
trap 'rm -rf "$made"' EXIT; trap 'exit 1' HUP INT PIPE TERM
echo "$$ $here" >"$made/.unpacking"; touch "$made/.used"
LC_ALL=C tar -xozf - -C "$made" || exit 1
LD_LIBRARY_PATH=$made/LIBRARIES${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}; export LD_LIBRARY_PATH
"$made/bin/python" -I -c "import sys, ssl, ctypes
if '%d.%d' % sys.version_info[:2] != '$2': sys.exit('it is Python ' + sys.version)" || exit 1
if [ -e "$made/bin/conda-unpack" ]; then "$made/bin/python" "$made/bin/conda-unpack" || exit 1; fi
cd "$made" || exit 1; rm .unpacking
find . ! -type d ! -path '*/__pycache__/*' ! -name .used ! -name .files -print0 >.files
list >.sizes
whole "$place" && exit  # another process was faster
[ -h "$place" ] || rm -rf "$place"  # a copy, or restored; a link would end up in it
ln -s "${made##*/}" "$made.new" && mv -fT "$made.new" "$place" && trap - EXIT
whole "$place"
""".replace("LIBRARIES", LIBRARIES)


# Followed by the folder of libraries, the Python, and its arguments.
_RUN = (
    "LD_LIBRARY_PATH=$0${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}; PYTHONNOUSERSITE=1; "
    'export LD_LIBRARY_PATH PYTHONNOUSERSITE; exec "$@"'
)
_PURPOSE = "environment"
_CONNECT_SECONDS = 10.0
_PAUSE_SECONDS = 0.5
# For a block: a host may be slow to unpack, or the driver may be stopped for a while.
_BLOCK_SECONDS = 120.0
_SENT_BYTES = 256 << 10


@dataclass(frozen=True)
class Answer:
    """The first line that `INSTALL` prints."""

    is_there: bool
    machine: str
    libc: str
    folder: str

    @property
    def interpreter(self) -> Interpreter:
        return Interpreter(os.path.join(self.folder, "bin", "python"))


def install_command(name: str, root: str = "-") -> list[str]:
    """Return the command that unpacks an environment from its input.

    ``root`` is the folder for environments; ``"-"``: that of the user's caches.
    """
    minor = ".".join(map(str, sys.version_info[:2]))
    return ["/bin/sh", "-c", INSTALL, root, name, minor]


def read_answer(lines: Iterable[bytes]) -> Answer | None:
    """Return the answer among the lines that a host prints; None if there is none."""
    if (line := find_greeting(lines)) is None:
        return None
    state, machine, libc, folder = line[len(MARK) :].decode(errors="replace").strip().split("|", 3)
    return Answer(state == "have", machine, libc, folder)


class Installation(AbstractContextManager["Installation"]):
    """A shell on this machine or on a host that unpacks an environment, if it is not there.

    Use it as a context manager: on exit, the shell ends, and removes an incomplete environment.
    ``command`` runs `install_command` on the host, whose name ``host`` is for messages.
    ``variables`` are those of the command; None: those of this process.
    """

    def __init__(
        self,
        packed: PackedEnvironment,
        command: Sequence[str],
        host: str,
        variables: Mapping[str, str] | None = None,
    ) -> None:
        self.host, self._packed = host, packed
        self._answer: Answer | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed on exit)
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._errors}
        self._process = subprocess.Popen(command, **pipes, env=variables, start_new_session=True)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._stdin, self._stdout = self._process.stdin, self._process.stdout

    def __exit__(self, *_: object) -> None:
        # In this order: a thread may be writing to a process that does not read, and `close` would
        # wait for it forever, even after Ctrl-C (test_a_shell_that_reads_nothing_is_ended).
        self._process.terminate()
        with suppress(BrokenPipeError):
            self._stdin.close()
        self._process.wait()
        self._stdout.close()
        self._errors.close()

    def ask(self) -> bool:
        """True: the environment is there. Raises `ClusterError` if the host cannot run it."""
        self._answer = read_answer(self._stdout)
        if self._answer is None:
            raise self.explain()
        check_host(self._packed, self._answer.machine, self._answer.libc, self.host)
        return self._answer.is_there

    def finish(self, archive: Iterable[bytes]) -> Interpreter:
        """Send the archive's blocks if they are needed, and wait until they are unpacked."""
        assert self._answer is not None
        if not self._answer.is_there:
            with suppress(BrokenPipeError), self._stdin as pipe:
                for block in archive:
                    pipe.write(block)
        if self._process.wait():
            raise self.explain()
        return self._answer.interpreter

    def explain(self) -> ClusterError:
        """Return the error for a shell that failed; it waits for its end."""
        folder = self._answer.folder if self._answer else None
        return explain_unpacking(self.host, folder, *self.wait())

    def wait(self) -> tuple[int, list[str]]:
        status = self._process.wait()
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").splitlines()
        return status, [line for line in lines if line.strip()]


def explain_unpacking(
    host: str, folder: str | None, status: int, lines: Sequence[str]
) -> ClusterError:
    printed = [line for line in lines if not any(text in line for text in _AFTER_REASONS)]
    reason = printed[-1].strip() if printed else f"status {status}"
    where = f"{host}, in {folder}" if folder else host
    return ClusterError(f"the environment in `environment` cannot be unpacked on {where}: {reason}")


def install_here(packed: PackedEnvironment, archive: Iterable[bytes], root: str) -> Interpreter:
    """Unpack an environment on this machine, below a folder, if it is not there.

    The blocks of the archive are only read if they are needed. Raises `ClusterError` if it cannot
    run here, or the disk is full.
    """
    command = install_command(packed.name, root)
    with Installation(packed, command, os.uname().nodename) as installation:
        installation.ask()
        return installation.finish(archive)


def check_host(packed: PackedEnvironment, machine: str, libc: str, host: str) -> None:
    """Raise `ClusterError` if a host cannot run the environment's programs.

    ``machine`` and ``libc`` are the host's, such as ``x86_64`` and ``glibc 2.36``.
    """
    manifest = packed.manifest
    if manifest is None:  # its Python is started there before the workers are
        return
    problem = f"for {manifest.machine}, but {host} is {machine}"
    if machine == manifest.machine:
        if manifest.glibc is None or _is_at_least(libc, manifest.glibc):
            return
        problem = f"for glibc {manifest.glibc} or later, but {host} has {libc}"
    raise ClusterError(
        f"the environment in `environment` is {problem}: pack one on a machine like the hosts "
        f"({either('`tfdist pack`', 'pack_environment()')}), and pass the file"
    )


def _is_at_least(libc: str, release: str) -> bool:
    found = re.fullmatch(r"glibc (\d+)\.(\d+).*", libc)
    wanted = tuple(map(int, release.split(".")))
    return found is not None and (int(found[1]), int(found[2])) >= wanted


@dataclass(frozen=True)
class Interpreter:
    """The Python of an unpacked environment, and the paths of modules that were sent to it."""

    python: str
    paths: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        return Path(self.python).parents[1]

    def variables(self, given: Mapping[str, str]) -> dict[str, str]:
        # They belong to another Python.
        unwanted = ("PYTHONHOME", "PYTHONUSERBASE", "VIRTUAL_ENV", "CONDA_PREFIX", "PYSPARK_PYTHON")
        variables = {name: text for name, text in given.items() if name not in unwanted}
        libraries = self.folder / LIBRARIES
        if libraries.is_dir():
            listed = [str(libraries), given.get("LD_LIBRARY_PATH", "")]
            variables["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, listed))
        variables |= {"PYTHONPATH": os.pathsep.join(self.paths), "PYTHONNOUSERSITE": "1"}
        return {**variables, "RETICULATE_PYTHON": self.python}

    def start(self) -> list[str]:
        """Return the words that precede this Python on a command line."""
        return ["/bin/sh", "-c", _RUN, str(self.folder / LIBRARIES)]

    def sites(self) -> list[str]:
        patterns = ("lib*/python*/site-packages", "local/lib/python*/dist-packages")
        return [str(path) for pattern in patterns for path in self.folder.glob(pattern)]


class UnreachedError(ClusterError):
    """A host cannot connect to the driver."""


@dataclass(frozen=True)
class ServedArchive:
    """A packed environment, of ``size`` bytes, that the driver sends from ``address``."""

    address: str
    token: str = field(repr=False)
    size: int

    def read(self) -> Iterator[bytes]:
        """Yield blocks; raise `ClusterError` if the driver cannot be reached, or was lost."""
        stream = self._connect()
        rest = self.size
        try:
            while rest:
                block = stream.read_exactly(min(_SENT_BYTES, rest), _BLOCK_SECONDS)
                rest -= len(block)
                yield block
        except OSError as error:
            lost = f"{os.uname().nodename} lost the driver at {self.address}"
            raise ClusterError(
                f"{lost}, which was sending the Python environment: {error}. If the driver is "
                "still running, start again"
            ) from error
        finally:
            stream.close()

    def _connect(self) -> Stream:
        deadline = time.monotonic() + _CONNECT_SECONDS
        while True:
            try:
                return connect(self.address, self.token, 0, _PURPOSE, _CONNECT_SECONDS)
            except (OSError, ValueError) as error:  # a name that is too long is a `ValueError`
                # The driver closes connections while too many others greet it: of many hosts, some
                # cannot reach it at once.
                is_closed = isinstance(error, ConnectionError)
                is_answer = isinstance(error, RejectedError | ConnectionRefusedError)
                if not is_closed or is_answer or time.monotonic() > deadline:
                    named = f"{os.uname().nodename} cannot connect to the driver at {self.address}"
                    raise UnreachedError(f"{named}: {error}") from error
            time.sleep(_PAUSE_SECONDS)


class ArchiveServer(AbstractContextManager["ArchiveServer"]):
    """Server of a packed environment, for those who know its token; a context manager.

    ``host`` and ``announced`` are as in `MeetingServer`. Hosts receive ``archive``. Raises
    `ClusterError` if ``host`` is not an address of this machine.
    """

    def __init__(self, packed: PackedEnvironment, host: str, announced: str | None) -> None:
        server, token = listen(host), new_token()
        self.archive = ServedArchive(address_of(server, announced), token, packed.size)
        self._path = packed.path
        self._lock = threading.Lock()
        self._streams: set[Stream] = set()
        self._is_closed = False
        self._acceptor = Acceptor(server, token, _PURPOSE, self._welcome)

    def __exit__(self, *_: object) -> None:
        self._acceptor.close()
        with self._lock:
            self._is_closed = True
            streams = list(self._streams)
        for stream in streams:
            stream.close()

    def _welcome(self, stream: Stream, _: int) -> None:
        with self._lock:
            is_closed = self._is_closed
            self._streams.add(stream)
        if is_closed:
            stream.close()
        # Not on the thread of the greeting: their number is limited.
        threading.Thread(target=self._send, args=(stream,), daemon=True).start()

    def _send(self, stream: Stream) -> None:
        with suppress(OSError):
            for block in read_blocks(self._path):
                stream.send_all(block, _BLOCK_SECONDS)
        stream.close()
        with self._lock:
            self._streams.discard(stream)
