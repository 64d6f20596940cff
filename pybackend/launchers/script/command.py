"""What `tfdist run` starts: a Python file, a module, or an R file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pybackend.errors import ClusterError, InputError

_INTERPRETERS = ("python", "python3", "Rscript", "R")
# What is neither Python nor R, and would fail with an error of Python's.
_OTHERS = (".sh", ".bash", ".ipynb", ".rmd", ".qmd")


@dataclass(frozen=True)
class ScriptCommand:
    """A script and its arguments; ``name`` is a path, or a module's name."""

    kind: Literal["python", "module", "R"]
    name: str
    arguments: tuple[str, ...] = ()

    def command(self, python: str, rscript: str) -> list[str]:
        """The command line of one rank."""
        if self.kind == "R":
            return [rscript, self.name, *self.arguments]
        # Unbuffered: what a rank printed before it was killed must have been printed.
        module = ["-m"] if self.kind == "module" else []
        return [python, "-u", *module, self.name, *self.arguments]


def read_script(words: Sequence[str], is_module: bool) -> ScriptCommand:
    """The script that the rest of a command line means.

    Raises
    ------
    InputError
        There is none, or it is neither Python nor R.
    """
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise InputError("name a script, as in: tfdist run -w 2 train.py --epochs 3")
    name, *arguments = words
    if is_module:
        return ScriptCommand("module", name, tuple(arguments))
    if name.lower().endswith(_OTHERS):
        raise InputError(
            f"{name} is neither a Python file nor an R file, and only these can be started: name "
            "the Python or R file itself. What a shell script sets before it, --env can set, or "
            "the shell that calls tfdist"
        )
    is_r = name.lower().endswith(".r")
    return ScriptCommand("R" if is_r else "python", name, tuple(arguments))


def check_script(script: ScriptCommand, folder: str) -> None:
    """Whether the script can be started in a folder of this machine.

    Raises
    ------
    ClusterError
        The folder or the file is not there, or Rscript.
    """
    if not os.path.isdir(folder):
        raise ClusterError(f"there is no folder {folder}: make it, or choose another with --cwd")
    path = os.path.join(folder, script.name)
    if script.kind != "module" and not os.path.isfile(path):
        hint = "the script must be at the same path on every host"
        if os.path.basename(script.name) in _INTERPRETERS:
            hint = f"leave out {script.name!r}, and name the script"
        raise ClusterError(f"there is no file {path}: {hint}")
    if script.kind == "R" and not shutil.which("Rscript"):
        raise ClusterError(f"{script.name} needs Rscript, which is not on the PATH: install R")


def check_temporary(folder: str | None) -> None:
    """Whether the folder for temporary files is there: Python and R would silently use another.

    Raises
    ------
    ClusterError
        It is not.
    """
    if folder and not os.path.isdir(folder):
        raise ClusterError(
            f"TMPDIR is {folder}, and {os.uname().nodename} has no such folder: make it, or name "
            "another one, as in --env TMPDIR=/tmp"
        )


def own_python(variables: Mapping[str, str], python: str) -> dict[str, str]:
    """Where R embeds Python: the one that the Python ranks would run in, unless it is set."""
    return {} if variables.get("RETICULATE_PYTHON") else {"RETICULATE_PYTHON": python}
