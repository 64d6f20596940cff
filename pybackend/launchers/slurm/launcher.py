"""Workers as the tasks of a Slurm job, started from a login node."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pybackend.data.arrays import Columns
from pybackend.errors import ClusterError, InputError
from pybackend.job.job import Job
from pybackend.job.messages import Emit
from pybackend.launchers.base import Outcome, Submission
from pybackend.launchers.member import Member
from pybackend.launchers.remote.bundle import LIBRARY, Bundle
from pybackend.launchers.remote.gang import run_gang
from pybackend.launchers.remote.janitor import swept_folder
from pybackend.launchers.remote.packing import pack_task
from pybackend.launchers.remote.task import TASK, RemoteTask
from pybackend.launchers.slurm.guard import cancelled_in_the_end
from pybackend.launchers.slurm.job_files import JobFiles
from pybackend.launchers.slurm.notice import notice_seconds, signal_option
from pybackend.launchers.slurm.queue import node_address, submit
from pybackend.launchers.slurm.script import batch_script, srun
from pybackend.launchers.slurm.settings import SlurmSettings, check_settings, with_resources
from pybackend.launchers.slurm.tasks import check_tasks, count_tasks
from pybackend.launchers.slurm.watch import SlurmWatch
from pybackend.net.meeting import MeetingServer
from pybackend.net.rendezvous import new_token, own_address

_SCRIPT = "job.sh"
# For a last checkpoint before the end of the job's time.
_NOTICE_SECONDS = 60
# Not `python -m`: that would let files of the current directory stand in for real modules.
_START = (
    "import sys; from pathlib import Path; folder = Path(sys.argv[1]); "
    f"sys.path[0] = str(folder / '{LIBRARY}'); "
    "from pybackend.launchers.slurm.task import main; sys.exit(main(folder))"
)
_CHOOSE_PYTHON = "name a Python that all nodes have: slurm(python=...)"


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
    """Train on the nodes of a Slurm cluster, from a login node: the first argument of a call.

    Each call submits a job of one task per worker, shows its place in the queue and its progress,
    and returns the result. Ctrl-C cancels the job, and so does the end of this process. A call
    that does not say how many `workers` has one per node, or as many as ``ntasks-per-node`` says.
    A training with `checkpoint` is kept when Slurm tells the job to end, which it does 60 seconds
    before its time is over (limits of ten minutes and more), or as the option ``signal`` says:
    ``"TERM@300"``.

    Parameters
    ----------
    partition
        Where the job runs; None: the cluster's default, as for all that follows.
    time
        Limit in minutes, or as Slurm has it: ``"1:30:00"``, ``"2-12:00"``.
    nodes
        Nodes among which the workers are spread; each has at least one.
    gpus, cpus
        GPUs and cores of each worker.
    options
        Further options of sbatch by their long names, as in
        ``{"account": "physics", "mem-per-cpu": "4G", "exclusive": True}``.
    setup
        Shell commands before the workers start, such as ``"module load cuda"``.
    folder
        Where the job's own folder is made, and removed in the end: on a file system that nodes
        share with this machine; None: ``~/.tfdist``.
    python
        The Python of the nodes, which needs TensorFlow; None: the path of this one.
    address
        An address of this machine that nodes reach; None: the one on the route to them.
    patience
        Seconds that the job may wait in the queue; None: no limit.

    Raises
    ------
    InputError
        Names the argument that is wrong.

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


class SlurmLauncher:
    """One task per worker; events arrive on the calling thread. Made by `slurm`."""

    is_here = False
    session = None
    workers = None
    why_fixed = "a Slurm job keeps the tasks that it began with"

    def __init__(self, settings: SlurmSettings) -> None:
        self.settings = settings

    def __repr__(self) -> str:
        return f"slurm({self.settings.partition or ''})"

    @property
    def where(self) -> str:
        """See `Launcher`."""
        named = self.settings.partition
        return "tasks of a Slurm job" + (f" (partition {named})" if named else "")

    def describe(self, job: Job) -> Submission:
        """See `Describing`."""
        settings = with_resources(self.settings, job.resources)
        folder = settings.folder / "tfdist-XXXXXXXX"
        own = JobFiles(folder, job.workers)
        options = _describe_job(settings, "tfdist-XXXXXXXX", own, job.keeps_checkpoints)
        script = _describe_script(settings, folder, own, options)
        later = (
            "the letters in place of XXXXXXXX",
            "when the job begins, and on which nodes",
        )
        return Submission(("a task of the job",) * job.workers, {_SCRIPT: script}, later)

    def count_workers(self, wanted: Any) -> Any:
        """See `Slotted`."""
        nodes, per_node = self.settings.nodes, self.settings.per_node
        if wanted is None:
            return count_tasks(nodes, per_node)
        if isinstance(wanted, int):  # what else it may be is checked later
            check_tasks(wanted, nodes, per_node)
        return wanted

    def launch(
        self,
        job: Job,
        files: Mapping[str, bytes],
        datasets: Mapping[str, Columns],
        on_event: Emit,
    ) -> Outcome:
        """See `Launcher`."""
        settings = with_resources(self.settings, job.resources)
        token = new_token()
        name = f"tfdist-{new_token()[:8]}"
        address = settings.address or _find_address(settings.partition)
        try:
            settings.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"`folder` of slurm(), {settings.folder}: {error}") from error
        with ExitStack() as stack:
            folder = stack.enter_context(swept_folder(str(settings.folder)))
            meeting = stack.enter_context(MeetingServer(address, token, job.workers))
            driver = meeting.address
            member = Member(job, files, None, token, driver, False, remedy=_CHOOSE_PYTHON)
            # Which hosts, the tasks learn from Slurm.
            contents = pack_task(RemoteTask(member, ()), folder, datasets)
            own = JobFiles(folder, job.workers)
            options = _describe_job(settings, name, own, job.keeps_checkpoints)
            script = _describe_script(settings, folder, own, options).encode()
            Bundle({**contents, _SCRIPT: script}).write(folder)
            (folder / TASK).chmod(0o600)
            cancelled = stack.enter_context(cancelled_in_the_end(name))
            number = submit(folder / _SCRIPT)
            seconds = notice_seconds(options["signal"])
            watch = SlurmWatch(number, own, meeting, on_event, settings.patience, seconds)
            outcome = run_gang(meeting, job, own, on_event, watch.look, explain=watch.explain)
            cancelled.let_go()
            return outcome


def _describe_job(
    settings: SlurmSettings, name: str, files: JobFiles, is_kept: bool
) -> dict[str, Any]:
    """sbatch's options."""
    return {
        "job-name": name,
        "ntasks": len(files),
        "partition": settings.partition,
        "time": settings.time,
        "nodes": settings.nodes,
        "gpus-per-task": settings.gpus or None,
        "cpus-per-task": settings.cpus,
        "output": files.batch_log,
        # Its driver is told, and may start again.
        "no-requeue": True,
        "signal": signal_option(settings.time, _NOTICE_SECONDS) if is_kept else None,
        **settings.options,
    }


def _describe_script(
    settings: SlurmSettings, folder: Path, files: JobFiles, options: Mapping[str, Any]
) -> str:
    """The batch script."""
    # srun takes it from sbatch's variables no more.
    step = {
        "cpus-per-task": settings.cpus,
        "gpus-per-task": settings.gpus or None,
        "output": files.task_log,
    }
    command = srun(step, [settings.python, "-u", "-c", _START, str(folder)])
    # A `module load` that fails must not go unnoticed.
    setup = ["set -e", settings.setup, "set +e"] if settings.setup else []
    return batch_script(options, [*setup, f"exec {shlex.join(command)}"])


def _find_address(partition: str | None) -> str:
    node = node_address(partition)
    address = own_address(node)
    if address is None:
        raise ClusterError(
            f"this machine has no route to the node {node}: give slurm() the `address` by which "
            "nodes reach it"
        )
    return address
