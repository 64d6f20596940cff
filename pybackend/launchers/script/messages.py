"""Ranks that `tfdist run` starts, and the JSON lines between its driver and its agents."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from pybackend.errors import ClusterError, InputError
from pybackend.job.codec import decode

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
        There is no script, or it is neither a Python nor an R script.
    """
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise InputError("specify a script, as in: tfdist run -w 2 train.py --epochs 3")
    name, *arguments = words
    if is_module:
        return ScriptCommand("module", name, tuple(arguments))
    if name.lower().endswith(_OTHERS):
        raise InputError(
            f"{name} is neither a Python file nor an R file, and only those can be started: "
            "specify the Python or R file itself. Set the variables of a shell script with --env, "
            "or in the shell that calls tfdist"
        )
    is_r = name.lower().endswith(".r")
    return ScriptCommand("R" if is_r else "python", name, tuple(arguments))


def check_script(script: ScriptCommand, folder: str) -> None:
    """Check that the script can be started in a folder on this machine.

    Raises
    ------
    ClusterError
        The folder, the file or Rscript does not exist.
    """
    if not os.path.isdir(folder):
        raise ClusterError(f"there is no folder {folder}: create it, or choose another with --cwd")
    path = os.path.join(folder, script.name)
    if script.kind != "module" and not os.path.isfile(path):
        hint = "the script must be at the same path on every host"
        if os.path.basename(script.name) in _INTERPRETERS:
            hint = f"leave out {script.name!r}, and pass the script"
        raise ClusterError(f"there is no file {path}: {hint}")
    if script.kind == "R" and not shutil.which("Rscript"):
        raise ClusterError(f"{script.name} needs Rscript, which is not on the PATH: install R")


def check_temporary(folder: str | None) -> None:
    """Check that the folder for temporary files exists: if not, Python and R ignore it silently.

    Raises
    ------
    ClusterError
        It does not exist.
    """
    if folder and not os.path.isdir(folder):
        raise ClusterError(
            f"TMPDIR is {folder}, but {os.uname().nodename} has no such folder: create it, or "
            "choose another one, as in --env TMPDIR=/tmp"
        )


def own_python(variables: Mapping[str, str], python: str) -> dict[str, str]:
    """Return the variable with the Python that R embeds: that of Python ranks, unless set."""
    return {} if variables.get("RETICULATE_PYTHON") else {"RETICULATE_PYTHON": python}


Stream = Literal["out", "err"]
LONGEST_READ = 65536


@dataclass(frozen=True)
class Prepare:
    """Check that the script can run, and reserve ports.

    Attributes
    ----------
    folder
        Working directory of the script.
    ranks
        Ranks on this host.
    reserves
        True if a port is reserved for each rank; else their addresses are already known.
    host
        Address of this host for other ranks; None: the address that ssh used.
    temporary
        TMPDIR of the ranks, if the user set it.
    """

    script: ScriptCommand
    folder: str
    ranks: tuple[int, ...]
    reserves: bool = True
    host: str | None = None
    temporary: str | None = None


@dataclass(frozen=True)
class Ready:
    """The agent reads orders from now on; none may be sent earlier."""


@dataclass(frozen=True)
class Prepared:
    """The ``host:port`` reserved for each rank."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class CannotRun:
    """The script cannot run on this host."""

    reason: str


@dataclass(frozen=True)
class StartRanks:
    """Start the ranks, each with these environment variables in addition to the host's own."""

    variables: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Deliver:
    """Send a signal to all ranks; SIGKILL also to their descendants."""

    signal: int


@dataclass(frozen=True)
class Printed:
    """Output from a rank: bytes, as Latin-1 text."""

    rank: int
    stream: Stream
    text: str


@dataclass(frozen=True)
class Ended:
    """A rank has ended: its exit status, or the negated signal number."""

    rank: int
    status: int


Order = Prepare | StartRanks | Deliver
Answer = Ready | Prepared | CannotRun | Printed | Ended


def read_order(line: bytes) -> Order:
    """Parse an order from the driver; `ValueError` if the line is invalid."""
    order: Order = decode(line, *get_args(Order))
    return order


def read_answer(line: bytes) -> Answer:
    """Parse an answer from an agent; `ValueError` if the line is invalid."""
    answer: Answer = decode(line, *get_args(Answer))
    return answer
