"""What a host gets to run workers: this package, their task, their rows; and how it starts."""

from __future__ import annotations

import base64
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path

from pybackend.launchers.package_files import library_files
from pybackend.launchers.remote.janitor import SWEEP

LIBRARY = "lib"
_BLOCK = 1 << 20
# Under the interpreter's own options: its current folder must not stand in for real modules.
_RUN = "import base64,sys;del sys.path[0];exec(base64.b64decode('{}'))"


@dataclass(frozen=True)
class Bundle:
    """Files of a folder by their names in it: contents, and files of this machine."""

    contents: Mapping[str, bytes]
    files: Mapping[str, Path] = field(default_factory=dict)

    def send(self, write: Callable[[bytes], object]) -> None:
        """Pass all of it on, for `bootstrap`: a line of names and sizes, then contents.

        Raises
        ------
        OSError
            If nobody reads.
        """
        sizes = [(name, len(content)) for name, content in self.contents.items()]
        sizes += [(name, path.stat().st_size) for name, path in self.files.items()]
        write(json.dumps(sizes).encode() + b"\n")
        for content in self.contents.values():
            write(content)
        for path in self.files.values():
            with path.open("rb") as file:
                while block := file.read(_BLOCK):
                    write(block)

    def write(self, folder: Path) -> None:
        """Write all of it into a folder that the hosts share."""
        for name, content in self.contents.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for name, source in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, path)


def library() -> dict[str, bytes]:
    """The part of every bundle from which ``import pybackend`` works."""
    return {f"{LIBRARY}/{name}": content for name, content in library_files().items()}


def bootstrap_command(python: str, wanted: str, task: str) -> list[str]:
    """The command that takes a bundle from standard input.

    ``wanted`` is as in `bootstrap`; ``task`` the module of `pybackend.launchers`
    whose ``run`` it calls then.
    """
    folder = files("pybackend.launchers")
    texts = [folder.joinpath(name).read_text() for name in ("machine.py", "remote/bootstrap.py")]
    call = f"main({SWEEP!r}, {wanted!r}, {task!r}, read_machine())"
    program = "\n".join([*texts, call, ""])
    return [python, "-u", "-c", _RUN.format(base64.b64encode(program.encode()).decode())]
