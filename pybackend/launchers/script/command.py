"""Script of `tfdist run`: a Python file, a module, or an R file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pybackend.errors import ClusterError, InputError

_INTERPRETERS = ("python", "python3", "Rscript", "R")
# Neither Python nor R: these would fail with a syntax error of Python.
_OTHERS = (".sh", ".bash", ".ipynb", ".rmd", ".qmd")


@dataclass(frozen=True)
class ScriptCommand:
    """A script and its arguments; ``name`` is a path, or a module's name."""

    kind: Literal["python", "module", "R"]
    name: str
    arguments: tuple[str, ...] = ()

    def command(self, python: str, rscript: str) -> list[str]:
        """Return the command line of one rank."""
        if self.kind == "R":
            return [rscript, self.name, *self.arguments]
        # Unbuffered: the output of a killed rank must not be lost.
        module = ["-m"] if self.kind == "module" else []
        return [python, "-u", *module, self.name, *self.arguments]


def read_script(words: Sequence[str], is_module: bool) -> ScriptCommand:
    """Parse a script and its arguments.

    Raises
    ------
    InputError
        There is no script, or it is neither Python nor R.
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
            "the Python or R file itself. Set the variables of a shell script with --env, or in "
            "the shell that calls tfdist"
        )
    is_r = name.lower().endswith(".r")
    return ScriptCommand("R" if is_r else "python", name, tuple(arguments))


def check_script(script: ScriptCommand, folder: str) -> None:
    """Check that the script can be started in a folder of this machine.

    Raises
    ------
    ClusterError
        The folder, the file or Rscript does not exist.
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
    """Check that the folder for temporary files exists: else Python and R silently use another.

    Raises
    ------
    ClusterError
        It does not exist.
    """
    if folder and not os.path.isdir(folder):
        raise ClusterError(
            f"TMPDIR is {folder}, and {os.uname().nodename} has no such folder: make it, or name "
            "another one, as in --env TMPDIR=/tmp"
        )


def own_python(variables: Mapping[str, str], python: str) -> dict[str, str]:
    """Return the variable with the Python that R embeds: that of Python ranks, unless it is set."""
    return {} if variables.get("RETICULATE_PYTHON") else {"RETICULATE_PYTHON": python}
