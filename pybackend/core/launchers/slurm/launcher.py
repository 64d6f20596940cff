"""Workers as the tasks of a Slurm job, started from a login node."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.arguments import name_arguments
from pybackend.core.job.job import Job, TrainingJob
from pybackend.core.job.messages import Emit, Note
from pybackend.core.launchers.base import (
    DataSets,
    Files,
    Outcome,
    QueuedLauncher,
    Submission,
    reject_fork_server,
)
from pybackend.core.launchers.environment.archive import PackedEnvironment, pack_for
from pybackend.core.launchers.environment.installing import Interpreter, install_here, read_blocks
from pybackend.core.launchers.member import Member
from pybackend.core.launchers.remote.bundle import Bundle
from pybackend.core.launchers.remote.group import run_on_hosts
from pybackend.core.launchers.remote.packing import pack_task
from pybackend.core.launchers.remote.task import TASK, RemoteTask
from pybackend.core.launchers.slurm.jobs import (
    SCRIPT,
    JobWay,
    describe_job,
    describe_script,
    describe_shared,
    with_steps,
)
from pybackend.core.launchers.slurm.queue import node_address
from pybackend.core.launchers.slurm.settings import (
    SlurmSettings,
    check_settings,
    check_tasks,
    count_tasks,
    with_resources,
)
from pybackend.core.launchers.slurm.watch import JobFiles
from pybackend.core.machine import own_address
from pybackend.core.machine.janitor import swept_folder
from pybackend.core.net.rendezvous import new_token
from pybackend.core.words import call_of

_ENVIRONMENTS = "environments"


@name_arguments
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
    return SlurmLauncher(
        check_settings(
            partition=partition,
            time=time,
            nodes=nodes,
            gpus=gpus,
            cpus=cpus,
            options=options,
            setup=setup,
            folder=folder,
            python=python,
            address=address,
            patience=patience,
        )
    )


class SlurmLauncher(QueuedLauncher):
    """One task per worker; events arrive on the calling thread. Returned by `slurm`."""

    def __init__(self, settings: SlurmSettings) -> None:
        self.settings = settings

    def __repr__(self) -> str:
        return f"slurm({self.settings.partition or ''})"

    @property
    def where(self) -> str:
        named = self.settings.partition
        return "tasks of a Slurm job" + (f" (partition {named})" if named else "")

    def check(self, job: Job) -> None:
        """Reject workers that do not fit the requested nodes."""
        reject_fork_server(job)
        if job.is_elastic:
            self.settings.count_places(job.most_workers)
        else:
            check_tasks(job.workers, self.settings.nodes, self.settings.per_node)

    def describe(self, job: Job) -> Submission:
        """Describe the job; elastic training has one job per worker, or a step in a common job."""
        self.check(job)
        settings = with_resources(self.settings, job.resources)
        folder = settings.folder / "tfdist-XXXXXXXX"
        if isinstance(job, TrainingJob) and job.is_elastic and settings.is_shared:
            script = describe_shared(settings, "tfdist-XXXXXXXX", job, folder)[1]
            place = "a step of the job"
        else:
            own = JobFiles(folder, 1 if job.is_elastic else job.workers)
            options = describe_job(settings, "tfdist-XXXXXXXX", own, job.can_go_on)
            script = describe_script(settings, folder, own, options)
            place = "its own job" if job.is_elastic else "a task of the job"
        later = (
            "the letters that replace XXXXXXXX",
            "when the job begins, and on which nodes",
        )
        return Submission((place,) * job.workers, {SCRIPT: script}, later)

    def count_workers(self, wanted: Any) -> Any:
        if wanted is None:
            return count_tasks(self.settings.nodes, self.settings.per_node)
        return wanted

    def launch(self, job: Job, files: Files, datasets: DataSets, on_event: Emit) -> Outcome:
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
            way = JobWay(settings, address, token, name, folder)
            if isinstance(job, TrainingJob) and job.is_elastic and settings.is_shared:
                way = stack.enter_context(with_steps(way, job))
            return run_on_hosts(way, job, datasets, on_event, places, remedy)


def _install(packed: PackedEnvironment, folder: Path, on_event: Emit) -> Interpreter:
    """Return the Python of an environment in a job folder, which the nodes share."""

    def blocks() -> Iterator[bytes]:
        on_event(Note(f"unpacking the Python environment in {folder}"))
        yield from read_blocks(packed.path)

    return install_here(packed, blocks(), str(folder / _ENVIRONMENTS))


def _find_address(partition: str | None) -> str:
    node = node_address(partition)
    address = own_address(node)
    if address is None:
        raise ClusterError(
            f"this machine has no route to the node {node}: pass slurm() an `address` of this "
            "machine that the nodes can reach"
        )
    return address
