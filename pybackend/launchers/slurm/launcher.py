"""Workers as the tasks of a Slurm job, started from a login node."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pybackend.errors import ClusterError, InputError
from pybackend.job.job import Job, TrainingJob
from pybackend.job.messages import Emit, Note
from pybackend.launchers.base import (
    DataSets,
    Files,
    Launcher,
    Outcome,
    Submission,
    divide_queue,
)
from pybackend.launchers.elastic import train_elastically
from pybackend.launchers.environment.installing import install_here
from pybackend.launchers.environment.packing import pack_for
from pybackend.launchers.member import Member
from pybackend.launchers.remote.bundle import LIBRARY, Bundle
from pybackend.launchers.remote.elastic_site import Follow, RemoteSite, as_group
from pybackend.launchers.remote.elastic_task import POST, Post
from pybackend.launchers.remote.group import run_group
from pybackend.launchers.remote.janitor import guarded, swept_folder
from pybackend.launchers.remote.packing import pack_task
from pybackend.launchers.remote.task import TASK, RemoteTask
from pybackend.launchers.slurm.batch import batch_script, srun
from pybackend.launchers.slurm.queue import node_address, notice_seconds, signal_option, submit
from pybackend.launchers.slurm.settings import (
    PER_NODE,
    SlurmSettings,
    check_settings,
    check_tasks,
    count_tasks,
    with_resources,
)
from pybackend.launchers.slurm.watch import JobFiles, SlurmWatch
from pybackend.net.meeting import MeetingServer
from pybackend.net.rendezvous import new_token, own_address
from pybackend.words import call_of

_SCRIPT = "job.sh"
_ENVIRONMENTS = "environments"
# For a last checkpoint before the job's time limit.
_NOTICE_SECONDS = 60
# Not `python -m`: with it, files in the current directory would shadow installed modules.
_START = (
    "import sys; from pathlib import Path; folder = Path(sys.argv[1]); "
    f"sys.path[0] = str(folder / '{LIBRARY}'); "
    "from pybackend.launchers.slurm.task import main; sys.exit(main(folder, Path(sys.argv[2])))"
)
# A shell that waits for the end of its input; a line of text means that the job has ended already.
# Slurm's controller may be unavailable for a moment.
_CANCEL = (
    "read -r _ || for try in 1 2 3 4 5; do "
    'scancel --quiet --name="$0" --user="$(id -un)" && break; sleep 3; done'
)


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
    ``ntasks-per-node``. A training run with `checkpoint` is saved when Slurm sends the termination
    signal: 60 seconds before the time limit (limits of ten minutes and more), or as set by the
    option ``signal``: ``"TERM@300"``. An elastic training run has one job per worker.

    Parameters
    ----------
    partition
        Partition of the job. None (default): the cluster's default, as for all arguments that
        follow.
    time
        Time limit in minutes, or in Slurm's format: ``"1:30:00"``, ``"2-12:00"``.
    nodes
        Number of nodes to spread the workers over. Each node has at least one worker.
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


class SlurmLauncher:
    """One task per worker; events arrive on the calling thread. Returned by `slurm`."""

    is_here = False
    session = None
    workers = None

    def __init__(self, settings: SlurmSettings) -> None:
        self.settings = settings

    @property
    def why_fixed(self) -> str | None:
        """Options that fix the workers; without them, each elastic worker has its own job."""
        settings = self.settings
        for name, given in (("nodes", settings.nodes), (PER_NODE, settings.per_node)):
            if given is not None:
                return (
                    f"{name}={given} of slurm() requests one job with a fixed set of tasks "
                    "(without it, each worker is its own job)"
                )
        return None

    def __repr__(self) -> str:
        return f"slurm({self.settings.partition or ''})"

    @property
    def where(self) -> str:
        named = self.settings.partition
        return "tasks of a Slurm job" + (f" (partition {named})" if named else "")

    def describe(self, job: Job) -> Submission:
        """Describe the job; elastic training has one job per worker."""
        settings = with_resources(self.settings, job.resources)
        folder = settings.folder / "tfdist-XXXXXXXX"
        own = JobFiles(folder, 1 if job.is_elastic else job.workers)
        options = _describe_job(settings, "tfdist-XXXXXXXX", own, job.can_go_on)
        script = _describe_script(settings, folder, own, options)
        later = (
            "the letters that replace XXXXXXXX",
            "when the job begins, and on which nodes",
        )
        place = "its own job" if job.is_elastic else "a task of the job"
        return Submission((place,) * job.workers, {_SCRIPT: script}, later)

    def count_workers(self, wanted: Any) -> Any:
        nodes, per_node = self.settings.nodes, self.settings.per_node
        if wanted is None:
            return count_tasks(nodes, per_node)
        if isinstance(wanted, int):  # other types are checked later
            check_tasks(wanted, nodes, per_node)
        return wanted

    def divide(
        self, job: Job, most: int, parallelism: int | None
    ) -> AbstractContextManager[Sequence[Launcher]]:
        """Submit each job on its own: the cluster queues those for which it has no room."""
        return divide_queue(self, most, parallelism)

    def launch(self, job: Job, files: Files, datasets: DataSets, on_event: Emit) -> Outcome:
        settings = with_resources(self.settings, job.resources)
        token, name = new_token(), f"tfdist-{new_token()[:8]}"
        address = settings.address or _find_address(settings.partition)
        try:
            settings.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"`folder` of slurm(), {settings.folder}: {error}") from error
        if packed := pack_for(job, lambda text: on_event(Note(text))):
            # The nodes share this folder.
            on_event(Note(f"unpacking the Python environment in {settings.folder}"))
            found = install_here(packed, Path(packed.path), str(settings.folder / _ENVIRONMENTS))
            settings = replace(settings, interpreter=found)
        with swept_folder(str(settings.folder)) as folder:
            if isinstance(job, TrainingJob) and job.is_elastic:
                _pack(Member(job, files, None, token, None, False), folder, datasets)
                way = _Jobs(settings, address, token, name, job, folder)
                with RemoteSite(job.most_workers, way, _choose_python()) as site:
                    return train_elastically(job, datasets, on_event, site)
            with MeetingServer(address, token, job.workers) as meeting:
                driver = meeting.address
                member = Member(job, files, None, token, driver, False, remedy=_choose_python())
                _pack(member, folder, datasets)
                own = JobFiles(folder, job.workers)
                with _submitted(settings, name, job, meeting, folder, own, on_event) as follow:
                    return follow(on_event=on_event)


def _choose_python() -> str:
    return f"specify a Python that all nodes have: {call_of('slurm', python=...)}"


@dataclass(frozen=True)
class _Jobs:
    """A `Way` that submits a one-task job for each worker; their names begin with ``name``."""

    settings: SlurmSettings
    address: str
    token: str
    name: str
    job: TrainingJob
    folder: Path

    def name_host(self, number: int, place: int) -> str:
        return self._files(number)[0]

    def make_meeting(self) -> MeetingServer:
        return MeetingServer(self.address, self.token, 1)

    @contextmanager
    def open(self, number: int, place: int, meeting: MeetingServer, note: Emit) -> Iterator[Follow]:
        own = self._files(number)
        own.folder.mkdir()
        (own.folder / POST).write_bytes(Post(number, driver=meeting.address).to_json())
        name, job = f"{self.name}-{number}", as_group(self.job)
        with _submitted(self.settings, name, job, meeting, self.folder, own, note) as follow:
            yield follow

    def _files(self, number: int) -> JobFiles:
        return JobFiles(self.folder / f"worker-{number}", 1)


def _pack(member: Member, folder: Path, datasets: DataSets) -> None:
    """Write the bundle for all tasks; they get the names of their hosts from Slurm."""
    Bundle(pack_task(RemoteTask(member, ()), folder, datasets)).write(folder)
    (folder / TASK).chmod(0o600)


@contextmanager
def _submitted(
    settings: SlurmSettings,
    name: str,
    job: Job,
    meeting: MeetingServer,
    folder: Path,
    own: JobFiles,
    on_note: Emit,
) -> Iterator[Callable[..., Outcome]]:
    """Submit a job, and yield a function that waits for its workers. On exit, cancel the job."""
    options = _describe_job(settings, name, own, job.can_go_on)
    path = own.folder / _SCRIPT
    path.write_text(_describe_script(settings, folder, own, options))
    with guarded(["/bin/sh", "-c", _CANCEL, name]) as let_go:
        number, seconds = submit(path), notice_seconds(options["signal"])
        watch = SlurmWatch(number, own, meeting, on_note, settings.patience, seconds)

        def follow(**options: Any) -> Outcome:
            outcome = run_group(
                meeting, job, own, look=watch.look, explain=watch.explain, **options
            )
            let_go()
            return outcome

        yield follow


def _describe_job(
    settings: SlurmSettings, name: str, files: JobFiles, can_go_on: bool
) -> dict[str, Any]:
    """Return the sbatch options."""
    return {
        "job-name": name,
        "ntasks": len(files),
        "partition": settings.partition,
        "time": settings.time,
        "nodes": settings.nodes,
        "gpus-per-task": settings.gpus or None,
        "cpus-per-task": settings.cpus,
        "output": files.batch_log,
        # The driver reports the failure, and may start again.
        "no-requeue": True,
        "signal": signal_option(settings.time, _NOTICE_SECONDS) if can_go_on else None,
        **settings.options,
    }


def _describe_script(
    settings: SlurmSettings, folder: Path, files: JobFiles, options: Mapping[str, Any]
) -> str:
    """Return the batch script."""
    # srun no longer reads it from sbatch's variables.
    step = {
        "cpus-per-task": settings.cpus,
        "gpus-per-task": settings.gpus or None,
        "output": files.task_log,
    }
    found = settings.interpreter
    start = [settings.python] if found is None else [*found.start(), found.python]
    command = srun(step, [*start, "-u", "-c", _START, str(folder), str(files.folder)])
    # A failure of `module load` must end the script.
    setup = ["set -e", settings.setup, "set +e"] if settings.setup else []
    return batch_script(options, [*setup, f"exec {shlex.join(command)}"])


def _find_address(partition: str | None) -> str:
    node = node_address(partition)
    address = own_address(node)
    if address is None:
        raise ClusterError(
            f"this machine has no route to the node {node}: pass slurm() an `address` of this "
            "machine that the nodes can reach"
        )
    return address
