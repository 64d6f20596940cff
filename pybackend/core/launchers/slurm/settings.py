"""Checked arguments of `slurm`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import as_number, check_positive, check_whole_number
from pybackend.core.job.worker_options import Resources
from pybackend.core.launchers.environment.installing import Interpreter
from pybackend.core.words import setting, show

_TIME = re.compile(r"\d+|\d+:\d\d(:\d\d)?|\d+-\d+(:\d\d){0,2}")
# Options that tfdist sets itself, or that would break the job.
_OURS = {
    "array": "each call is one job",
    "error": "see `folder`",
    "gpus-per-task": "use `gpus`",
    "cpus-per-task": "use `cpus`",
    "export": "use `setup`",
    "job-name": "tfdist finds its job by this name. Use 'comment' for your own text",
    "nodes": "use `nodes`",
    "ntasks": "use `workers` of the call",
    "output": "see `folder`",
    "partition": "use `partition`",
    "requeue": "use `restarts` of `Recovery`",
    "time": "use `time`",
    "wrap": "use `setup`",
}


# Other options whose names are prefixes of these.
_WHOLE = {"gpus"}
_MEMORY = {"mem", "mem-per-cpu", "mem-per-gpu"}
PER_NODE = "ntasks-per-node"


@dataclass(frozen=True)
class SlurmSettings:
    """Arguments of `slurm`, checked and with defaults filled in.

    ``interpreter`` is the Python of a call's environment, in a folder that the nodes share.
    """

    partition: str | None = None
    time: str | None = None
    nodes: int | None = None
    gpus: int | None = None
    cpus: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    setup: str = ""
    folder: Path = Path()
    python: str = sys.executable
    address: str | None = None
    patience: float = float("inf")
    interpreter: Interpreter | None = None

    @property
    def per_node(self) -> int | None:
        """Workers on each node, if specified."""
        return as_count(self.options.get(PER_NODE))

    @property
    def is_shared(self) -> bool:
        """True if the workers of elastic training are steps of one job, not jobs of their own."""
        return self.nodes is not None or self.per_node is not None

    def count_places(self, workers: int) -> int:
        """Return the number of tasks in a job for at most ``workers`` elastic workers.

        Raises
        ------
        InputError
            There are more workers than tasks.
        """
        tasks = count_tasks(self.nodes, self.per_node)
        if tasks is not None and self.per_node is not None and tasks < workers:
            check_tasks(workers, self.nodes, self.per_node)
        return max(workers, tasks or 0)


def check_settings(
    partition: str | None,
    time: str | int | None,
    nodes: int | None,
    gpus: int | None,
    cpus: int | None,
    options: Mapping[str, Any] | None,
    setup: str | None,
    folder: str | os.PathLike[str] | None,
    python: str | None,
    address: str | None,
    patience: float | None,
) -> SlurmSettings:
    """Check the arguments of `slurm`, and fill in defaults.

    Raises
    ------
    InputError
        An argument is invalid. The message names it.
    """
    where = Path(folder or "~/.tfdist").expanduser().absolute()
    for name, value in {"folder": str(where), "python": python, "partition": partition}.items():
        if value is not None and (not isinstance(value, str) or not value.isprintable()):
            raise InputError(f"`{name}` must be printable text, not {show(value)}")
    if not isinstance(setup or "", str):
        raise InputError(f"`setup` must be shell commands as text, not {show(setup)}")
    return SlurmSettings(
        partition=partition,
        time=_check_time(time),
        nodes=None if nodes is None else check_whole_number("nodes", nodes, least=1),
        gpus=None if gpus is None else check_whole_number("gpus", gpus, least=0),
        cpus=None if cpus is None else check_whole_number("cpus", cpus, least=1),
        options=_check_options(options or {}),
        setup=setup or "",
        folder=where,
        python=python or sys.executable,
        address=address,
        patience=float("inf") if patience is None else check_positive("patience", patience),
    )


def with_resources(settings: SlurmSettings, resources: Resources) -> SlurmSettings:
    """Return the settings of a job whose workers get these resources.

    Raises
    ------
    InputError
        The settings specify different resources.
    """
    found: dict[str, Any] = {}
    for name in ("cpus", "gpus"):
        given, wanted = getattr(settings, name), getattr(resources, name)
        if None not in (given, wanted) and given != wanted:
            raise InputError(
                f"`resources` gives each worker {wanted} {name}, but slurm({name}={given}) "
                "differs: specify it in only one of the two"
            )
        found[name] = given if wanted is None else wanted
    if resources.bytes is not None:
        if both := sorted(_MEMORY & settings.options.keys()):
            raise InputError(
                f"`resources` sets the memory of each worker, and so does {show(both[0])} in "
                "`options` of slurm(): specify it in only one of the two"
            )
        # Not `mem`, which applies to a node: only Slurm knows the number of workers per node.
        megabytes = -(-resources.bytes // ((found["cpus"] or 1) << 20))
        found["options"] = {**settings.options, "mem-per-cpu": f"{megabytes}M"}
    return replace(settings, **found)


def _check_time(time: Any) -> str | None:
    if time is None:
        return None
    text = str(_as_text(time))
    if not _TIME.fullmatch(text):
        raise InputError(
            "`time` must be a whole number of minutes, or text in Slurm's format, e.g. "
            f"{show('1:30:00')} or {show('2-12:00')}, not {show(time)}"
        )
    return text


def _check_options(options: Any) -> Mapping[str, Any]:
    if not isinstance(options, Mapping):
        raise InputError(f"`options` must map sbatch's long options to values, not {show(options)}")
    checked = {str(name).lstrip("-").replace("_", "-"): value for name, value in options.items()}
    return {name: _check_option(name, value) for name, value in checked.items()}


def _check_option(name: str, value: Any) -> str | bool:
    if not re.fullmatch(r"[a-z][a-z-]+", name):
        raise InputError(
            f"`options` has {show(name)}: expected a long option such as {show('account')}"
        )
    # Slurm accepts unambiguous prefixes of names.
    ours = next((one for one in _OURS if one.startswith(name) and name not in _WHOLE), None)
    if ours is not None:
        short = f", which means {show(ours)}" if ours != name else ""
        raise InputError(f"`options` cannot have {show(name)}{short}: {_OURS[ours]}")
    if value is True:
        return True
    text = _as_text(value)
    if not isinstance(text, str) or not text.isprintable():
        raise InputError(
            f"`options` has {setting(**{name: value})}: expected text, a number, or {show(True)} "
            "for an option without a value"
        )
    return text


def _as_text(value: Any) -> Any:
    """Format a number for Slurm; whole numbers from R arrive as 2.0."""
    number = as_number(value)
    if number is None:
        return value
    return str(int(number)) if number.is_integer() else str(number)


def as_count(value: Any) -> int | None:
    """Return a number of nodes or tasks; None if Slurm may choose it, as for ``2-4`` nodes."""
    text = str(value)
    return int(text) if text.isdecimal() and int(text) else None


def count_tasks(nodes: int | None, per_node: int | None) -> int | None:
    """Return the number of tasks in a job: ``per_node`` on each node, or one; None if unknown."""
    return None if nodes is None else nodes * (per_node or 1)


def check_tasks(workers: int, nodes: int | None, per_node: int | None) -> None:
    """Check that workers can be distributed over nodes.

    Parameters
    ----------
    nodes, per_node
        Number of nodes in the job, and of workers on each; None: Slurm decides.

    Raises
    ------
    InputError
        A node would have no worker, or the three numbers are inconsistent.
    """
    if nodes is None:
        return
    if nodes > workers:
        raise InputError(
            f"{nodes} nodes need at least {nodes} workers, but the number of workers is {workers}: "
            "use more workers, or fewer nodes"
        )
    if per_node is not None and nodes * per_node != workers:
        raise InputError(
            f"{nodes} nodes with {PER_NODE}={per_node} have {nodes * per_node} workers, but the "
            f"number of workers is {workers}: leave out {PER_NODE}, or make the numbers agree"
        )
