"""Script that `tfdist run` starts, its ranks on each host, and the variables of each rank.

This file is imported on the ranks' hosts.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.arguments import is_variable_name
from pybackend.core.launchers.hosts.ssh import HostSlots
from pybackend.core.launchers.shares import share_of_machine
from pybackend.core.net.authentication import new_token
from pybackend.core.tf_config import make_tf_config

HERE = "127.0.0.1"
# A file of the bundle, with a `ScriptTask`.
TASK = "script.json"
_INTERPRETERS = ("python", "python3", "Rscript", "R")
# Neither Python nor R: these would fail with a syntax error of Python.
_OTHERS = (".sh", ".bash", ".ipynb", ".rmd", ".qmd")


@dataclass(frozen=True)
class ScriptCommand:
    """A script and its arguments; ``name`` is a path, or a module's name."""

    kind: Literal["python", "module", "R"]
    name: str
    arguments: tuple[str, ...] = ()

    def command(self, python: str) -> list[str]:
        if self.kind == "R":
            return ["Rscript", self.name, *self.arguments]
        # Unbuffered: the output of a killed rank must not be lost.
        module = ["-m"] if self.kind == "module" else []
        return [python, "-u", *module, self.name, *self.arguments]


def read_script(words: Sequence[str], is_module: bool) -> ScriptCommand:
    """Parse a script and its arguments. Raises `InputError` if it is neither Python nor R."""
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
    return ScriptCommand("R" if name.lower().endswith(".r") else "python", name, tuple(arguments))


def check_script(script: ScriptCommand, folder: str) -> None:
    """Raise `ClusterError` if the folder, the file or Rscript does not exist on this machine."""
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
    """Raise `ClusterError` if there is no such folder: Python and R would ignore it silently."""
    if folder and not os.path.isdir(folder):
        raise ClusterError(
            f"TMPDIR is {folder}, but {os.uname().nodename} has no such folder: create it, or "
            "choose another one, as in --env TMPDIR=/tmp"
        )


@dataclass(frozen=True)
class HostRanks:
    """Ranks that run on one host.

    Attributes
    ----------
    name
        Name of the host, for messages.
    address
        Address of the host for other ranks; None: the address that ssh uses.
    host
        The host, which is reached by ssh; None: this machine.
    is_step
        True if the ranks are the tasks of a Slurm step, on nodes that Slurm chooses.
    first, neighbours
        The first local rank, and the number of ranks on the host; None: these.
    """

    name: str
    ranks: tuple[int, ...]
    address: str | None = HERE
    host: HostSlots | None = None
    is_step: bool = False
    first: int = 0
    neighbours: int | None = None

    @property
    def size(self) -> int:
        """Number of ranks on the host, including those that other drivers start."""
        return self.neighbours or len(self.ranks)


@dataclass(frozen=True)
class ScriptRun:
    """A run of a script.

    Attributes
    ----------
    world_size
        Number of ranks, including those of other drivers.
    sites
        Hosts, and the ranks that this driver starts there.
    folder
        Working directory of the script.
    variables
        Variables that the user set for all ranks.
    addresses
        ``host:port`` of every rank, if the user chose them; otherwise, ports are reserved.
    secret
        Shared secret, if other drivers start other ranks; otherwise, each start gets a new one.
    ssh_options, python
        Options of ssh, and the path of the hosts' Python.
    """

    script: ScriptCommand
    world_size: int
    sites: tuple[HostRanks, ...]
    folder: str
    variables: Mapping[str, str] = field(default_factory=dict)
    addresses: tuple[str, ...] = ()
    secret: str | None = field(default=None, repr=False)
    grace: float = 10.0
    restarts: int = 0
    shown: frozenset[int] | None = None
    output: Path | None = None
    ssh_options: tuple[str, ...] = ()
    python: str = ""

    def choose_secret(self) -> str | None:
        """Return the secret for one start; None if several drivers on one machine share none."""
        return self.secret if self.addresses else new_token()

    def task(self, site: HostRanks, secret: str | None, restart: int) -> ScriptTask:
        common = {"WORLD_SIZE": str(self.world_size), "TFDIST_RESTART": str(restart)}
        common |= {} if secret is None else {"TFDIST_SECRET": secret}
        variables, is_alone = {**self.variables, **common}, len(self.sites) == 1
        return ScriptTask(self.script, self.folder, site, is_alone, variables, self.addresses)


@dataclass(frozen=True)
class ScriptTask:
    """Ranks that a host starts once.

    Attributes
    ----------
    is_alone
        True if no other host takes part.
    variables
        Variables that all ranks have in common.
    addresses
        ``host:port`` of every rank, if they are known.
    """

    script: ScriptCommand
    folder: str
    site: HostRanks
    is_alone: bool
    variables: Mapping[str, str] = field(repr=False)
    addresses: tuple[str, ...] = ()

    def variables_of(
        self, addresses: Sequence[str], environment: Mapping[str, str] | None
    ) -> list[dict[str, str]]:
        """Return the variables of each of its ranks.

        ``addresses`` are those of the ranks on all hosts. ``environment`` has the variables of the
        host's processes, for each rank's share of the host; None: unknown.
        """
        site = self.site
        shares: list[dict[str, str]] = [{}] * site.size
        if environment is not None:
            shares = share_of_machine(site.size, {**environment, **self.variables})
        return [
            {
                **self.variables,
                "TF_CONFIG": make_tf_config(addresses, rank),
                "RANK": str(rank),
                "LOCAL_RANK": str(local_rank),
                "LOCAL_WORLD_SIZE": str(site.size),
                **shares[local_rank],
            }
            for local_rank, rank in enumerate(site.ranks, site.first)
        ]


# Variables that `tfdist run` itself sets.
_NAMES = re.compile("TF_CONFIG|TFDIST_SECRET|TFDIST_RESTART|(LOCAL_)?(RANK|WORLD_SIZE)")


def split_variable(text: str) -> tuple[str, str | None]:
    """Return the name and value in ``NAME=VALUE``; the value of ``NAME`` alone is None.

    Raises `InputError` if the name is invalid, or `tfdist run` sets it itself.
    """
    name, equals, value = text.partition("=")
    if _NAMES.fullmatch(name):
        raise InputError(f"--env {text}: tfdist sets it itself")
    if not is_variable_name(name):
        raise InputError(
            f"--env {text}: expected NAME=VALUE or NAME; a name consists of letters, digits and "
            "'_', and does not begin with a digit"
        )
    return name, value if equals else None
