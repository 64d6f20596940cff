"""Workers as the tasks of a Slurm job, started from a login node."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job import arguments
from pybackend.core.job.job import Job, TrainingJob
from pybackend.core.job.messages import Emit, Note
from pybackend.core.job.worker_options import Resources
from pybackend.core.launchers import base
from pybackend.core.launchers.environment.archive import PackedEnvironment, pack_for
from pybackend.core.launchers.environment.installing import Interpreter, install_here
from pybackend.core.launchers.member import Member
from pybackend.core.launchers.remote.bundle import Bundle, read_blocks
from pybackend.core.launchers.remote.group import run_on_hosts
from pybackend.core.launchers.remote.task import TASK, RemoteTask, pack_task
from pybackend.core.launchers.slurm import commands, jobs
from pybackend.core.launchers.slurm.watch import JobFiles
from pybackend.core.machine import own_address
from pybackend.core.machine.janitor import swept_folder
from pybackend.core.net.authentication import new_token
from pybackend.core.words import call_of, setting, show

_ENVIRONMENTS = "environments"


@arguments.name_arguments
def slurm(
    partition: str | None = None,
    *,
    time: str | int | None = None,
    nodes: int | None = None,
    gpus: int | None = None,
    cpus: int | None = None,
    options: Mapping[str, Any] | None = None,
    setup: str | None = None,
    folder: str | os.PathLike[str] | None = None,
    python: str | None = None,
    address: str | None = None,
    patience: float | None = None,
) -> SlurmLauncher:
    """Run workers on the nodes of a Slurm cluster. Pass it as the first argument of a call.

    Call it on a login node. Each call submits a job with one task per worker, shows its position in
    the queue and its progress, and returns the result. Ctrl-C, or the end of this process, cancels
    the job. Without `workers`, a call has one worker per node, or as many as the option
    ``ntasks-per-node``. A training run with `Recovery(uri)` is saved when Slurm sends the
    termination signal: 60 seconds before the time limit (limits of ten minutes and more), or as
    set by the option ``signal``: ``"TERM@300"``. An elastic training run has one job per
    worker. With ``nodes``, it has one job in which srun, on this machine, starts a step per
    worker.

    Parameters
    ----------
    partition
        Partition of the job. None (default): the cluster's default, as for all arguments that
        follow.
    time
        Time limit in minutes, or in Slurm's format: ``"1:30:00"``, ``"2-12:00"``.
    nodes
        Number of nodes to spread the workers over. Each node has at least one worker, except in
        elastic training, where a node may be a spare for lost workers.
    gpus, cpus
        GPUs and cores of each worker.
    options
        Further sbatch options by their long names, as in ``{"account": "physics", "mem-per-cpu":
        "4G", "exclusive": True}``.
    setup
        Shell commands to run before the workers start, such as ``"module load cuda"``.
    folder
        Parent of the job's own folder, which is removed at the end. It must be on a file system
        that the nodes share with this machine. None (default): ``~/.tfdist``.
    python
        The nodes' Python, which needs TensorFlow. None (default): the path of this Python.
    address
        An address at which the nodes can reach this machine. None (default): the one on the route
        to them.
    patience
        Maximum seconds that the job may wait in the queue. None (default): no limit.

    Raises
    ------
    InputError
        An argument is invalid. The message names it.

    Examples
    --------
    >>> import pybackend
    >>> cluster = pybackend.slurm(partition="gpu", time="2:00:00", nodes=2, gpus=1)
    >>> result = pybackend.barrier_train(cluster, model, (x, y), workers=4)  # doctest: +SKIP
    """
    # All arguments by name: no other variable exists here yet.
    return SlurmLauncher(check_settings(**locals()))


class SlurmLauncher(base.QueuedLauncher):
    """One task per worker; events arrive on the calling thread. Returned by `slurm`."""

    def __init__(self, settings: jobs.SlurmSettings) -> None:
        self.settings = settings

    def __repr__(self) -> str:
        return f"slurm({self.settings.partition or ''})"

    @property
    def where(self) -> str:
        named = self.settings.partition
        return "tasks of a Slurm job" + (f" (partition {named})" if named else "")

    def check(self, job: Job) -> None:
        base.reject_fork_server(job)
        if job.is_elastic:
            self.settings.count_places(job.most_workers)
        else:
            commands.check_tasks(job.workers, self.settings.nodes, self.settings.per_node)

    def describe(self, job: Job) -> base.Submission:
        self.check(job)
        settings, name = with_resources(self.settings, job.resources), "tfdist-XXXXXXXX"
        folder = settings.folder / name
        if isinstance(job, TrainingJob) and job.is_elastic and settings.is_shared:
            script = jobs.describe_shared(settings, name, job, folder)[1]
            where = "a step of the job"
        else:
            own = JobFiles(folder, 1 if job.is_elastic else job.workers)
            options = jobs.describe_job(settings, name, own, job.can_go_on)
            script = jobs.describe_script(settings, folder, own, options)
            where = "its own job" if job.is_elastic else "a task of the job"
        later = ("the letters that replace XXXXXXXX", "when the job begins, and on which nodes")
        return base.Submission((where,) * job.workers, {jobs.SCRIPT: script}, later)

    def count_workers(self, wanted: Any) -> Any:
        tasks = commands.count_tasks(self.settings.nodes, self.settings.per_node)
        return tasks if wanted is None else wanted

    def launch(
        self, job: Job, files: base.Files, datasets: base.DataSets, on_event: Emit
    ) -> base.Outcome:
        self.check(job)
        settings = with_resources(self.settings, job.resources)
        token, name = new_token(), f"tfdist-{new_token()[:8]}"
        address = settings.address or _find_address(settings.partition)
        try:
            settings.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"`folder` of slurm(), {settings.folder}: {error}") from error
        if packed := pack_for(job, lambda text: on_event(Note(text))):
            settings = replace(settings, interpreter=_install(packed, settings.folder, on_event))
        remedy = f"specify a Python that all nodes have: {call_of('slurm', python=...)}"
        places = settings.count_places(job.most_workers)
        with ExitStack() as stack:
            folder = stack.enter_context(swept_folder(str(settings.folder)))
            member = Member(job, files, None, token, None, False, remedy=remedy)
            # The tasks get the names of their hosts from Slurm.
            Bundle(pack_task(RemoteTask(member, ()), folder, datasets)).write(folder)
            (folder / TASK).chmod(0o600)
            way = jobs.JobWay(settings, address, token, name, folder)
            if isinstance(job, TrainingJob) and job.is_elastic and settings.is_shared:
                way = stack.enter_context(jobs.with_steps(way, job))
            return run_on_hosts(way, job, datasets, on_event, places, remedy)


def _install(packed: PackedEnvironment, folder: Path, on_event: Emit) -> Interpreter:
    """Return the Python of an environment in a job folder, which the nodes share."""

    def blocks() -> Iterator[bytes]:
        on_event(Note(f"unpacking the Python environment in {folder}"))
        yield from read_blocks(packed.path)

    return install_here(packed, blocks(), str(folder / _ENVIRONMENTS))


def _find_address(partition: str | None) -> str:
    node = commands.node_address(partition)
    if address := own_address(node):
        return address
    raise ClusterError(
        f"this machine has no route to the node {node}: pass slurm() an `address` of this machine "
        "that the nodes can reach"
    )


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


def check_settings(**given: Any) -> jobs.SlurmSettings:
    """Check the arguments of `slurm`, and fill in defaults. Raises `InputError`."""
    given["folder"] = given.get("folder") or "~/.tfdist"
    checked = {k: _CHECKS[k](k, value) for k, value in given.items() if value is not None}
    return jobs.SlurmSettings(**checked)


def with_resources(settings: jobs.SlurmSettings, resources: Resources) -> jobs.SlurmSettings:
    """Return the settings of a job whose workers get these resources.

    Raises `InputError` if the settings specify other ones.
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
    if resources.bytes is None:
        return replace(settings, **found)
    if both := sorted(_MEMORY & settings.options.keys()):
        raise InputError(
            f"`resources` sets the memory of each worker, and so does {show(both[0])} in "
            "`options` of slurm(): specify it in only one of the two"
        )
    # Not `mem`, which applies to a node: only Slurm knows the number of workers per node.
    megabytes = -(-resources.bytes // ((found["cpus"] or 1) << 20))
    options = {**settings.options, "mem-per-cpu": f"{megabytes}M"}
    return replace(settings, **found, options=options)


def _check_folder(name: str, value: Any) -> Path:
    return Path(_check_printable(name, str(Path(value).expanduser().absolute())))


def _check_printable(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value.isprintable():
        raise InputError(f"`{name}` must be printable text, not {show(value)}")
    return value


def _check_setup(name: str, value: Any) -> str:
    value = value or ""  # R's empty vector
    if not isinstance(value, str):
        raise InputError(f"`{name}` must be shell commands as text, not {show(value)}")
    return value


def _check_time(name: str, time: Any) -> str:
    text = str(_as_text(time))
    if not _TIME.fullmatch(text):
        raise InputError(
            f"`{name}` must be a whole number of minutes, or text in Slurm's format, e.g. "
            f"{show('1:30:00')} or {show('2-12:00')}, not {show(time)}"
        )
    return text


def _check_options(_: str, options: Any) -> Mapping[str, Any]:
    options = options or {}  # an empty list of R arrives as []
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


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "partition": _check_printable,
    "time": _check_time,
    "nodes": arguments.Whole(1),
    "gpus": arguments.Whole(0),
    "cpus": arguments.Whole(1),
    "options": _check_options,
    "setup": _check_setup,
    "folder": _check_folder,
    "python": lambda name, value: _check_printable(name, value) or sys.executable,
    "address": lambda _, value: value,
    "patience": arguments.check_positive,
}


def _as_text(value: Any) -> Any:
    """Format a number for Slurm; whole numbers from R arrive as 2.0."""
    if (number := arguments.as_number(value)) is None:
        return value
    return str(int(number)) if number.is_integer() else str(number)
