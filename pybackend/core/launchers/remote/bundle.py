"""Bundle of files for a host, the command that receives it, and the greeting of its Python."""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from pybackend.core.errors import ClusterError
from pybackend.core.job.codec import read_fields
from pybackend.core.launchers.package_files import pack_package
from pybackend.core.launchers.remote.bootstrap import MARK
from pybackend.core.launchers.shares import Machine
from pybackend.core.machine.janitor import SWEEP
from pybackend.core.machine.packages import TITLES

LIBRARY = "lib.zip"
_BLOCK = 1 << 20
# Files in the current directory must not shadow installed modules.
_RUN = "import base64,sys;del sys.path[0];exec(base64.b64decode('{}'))"


@dataclass(frozen=True)
class Bundle:
    """Files for a folder, by name: their contents, or files on this machine."""

    files: Mapping[str, bytes | Path]

    def send(self, write: Callable[[bytes], object]) -> None:
        """Write everything as `bootstrap` reads it: a line of names and sizes, then contents.

        Raises `OSError` if the reader has closed the connection.
        """
        sizes = {
            name: len(source) if isinstance(source, bytes) else source.stat().st_size
            for name, source in self.files.items()
        }
        write(json.dumps([*sizes.items()]).encode() + b"\n")
        for source in self.files.values():
            for block in read_blocks(source):
                write(block)

    def write(self, folder: Path) -> None:
        """Write all files into a folder that the hosts share."""
        for name, source in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("wb") as file:
                file.writelines(read_blocks(source))


def read_blocks(source: bytes | str | Path) -> Iterator[bytes]:
    """Yield a file's content in blocks; bytes are one."""
    if isinstance(source, bytes):
        yield source
    else:
        with open(source, "rb") as file:
            while block := file.read(_BLOCK):
                yield block


def library() -> dict[str, bytes]:
    """Return the file that makes ``import pybackend`` work; each bundle has it."""
    return {LIBRARY: pack_package(is_for_hosts=True)}


def bootstrap_command(python: str, wanted: str, task: str, root: str = "") -> list[str]:
    """Return the command that reads a bundle from standard input.

    ``wanted`` and ``task`` are as in `bootstrap`. ``root`` contains this package if the bundle does
    not.
    """
    folder = files("pybackend.core")
    names = ("machine/capacity.py", "launchers/remote/bootstrap.py")
    texts = [folder.joinpath(name).read_text() for name in names]
    path = f"sys.path.insert(0, {root!r})" if root else ""
    call = f"main({SWEEP!r}, {wanted!r}, {task!r}, read_machine())"
    return [python, "-u", "-c", as_argument("\n".join([*texts, path, call, ""]))]


def as_argument(program: str) -> str:
    """Return a program as text for ``python -c`` that passes through any shell."""
    return _RUN.format(base64.b64encode(program.encode()).decode())


# The greeting from `bootstrap`, which describes its Python and its machine.


@dataclass(frozen=True)
class HostGreeting:
    """Version, path and missing packages of a Python; ``machine`` has the fields of a `Machine`."""

    version: tuple[int, ...]
    python: str
    missing: tuple[str, ...]
    machine: dict[str, Any]


def find_greeting(lines: Iterable[bytes]) -> bytes | None:
    """Return the first line that begins with `MARK`, after a login shell's output, or None."""
    return next((line for line in lines if line.startswith(MARK)), None)


def read_greeting(line: bytes, host: str) -> HostGreeting:
    """Parse a line that begins with `MARK`. ``host`` is its host's name, for messages.

    Raises `ClusterError`.
    """
    try:
        said = read_fields(HostGreeting, json.loads(line[len(MARK) :]))
        read_fields(Machine, said.machine)
    except (ValueError, RecursionError) as error:
        check = "check whether a login shell there prints a line that begins with the word tfdist"
        raise ClusterError(f"{host} sent an invalid greeting ({error}): {check}") from error
    return said


def find_obstacle(
    greeting: HostGreeting, subject: str, where: str, other: str, install: str
) -> ClusterError | None:
    """Return the error if a Python cannot run workers.

    ``subject`` and ``where`` are the subject of a sentence, and the same with a preposition: "the
    image", "in the image". ``other`` and ``install`` are templates of advice: for another release,
    of which ``{own}`` is needed; for a missing ``{package}`` of ``{python}``.
    """
    python, version = greeting.python, ".".join(map(str, greeting.version))
    own = ".".join(map(str, sys.version_info[:2]))
    if greeting.version[:2] != sys.version_info[:2]:
        return ClusterError(
            f"{python} {where} is Python {version}, but this is Python {own}, and functions cannot "
            f"be sent between releases. {other.format(own=own)}"
        )
    if not greeting.missing:
        return None
    package = greeting.missing[0]
    title, advice = TITLES.get(package, package), install.format(python=python, package=package)
    return ClusterError(f"{subject} has no {title} for {python}. {advice}")
