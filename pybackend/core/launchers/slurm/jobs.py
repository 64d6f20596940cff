"""Workers as tasks of Slurm jobs, from sbatch to scancel: of one job, or of one for each worker.

In elastic training, each worker is a job of its own, or a step of a common job. `main` is what srun
starts for each worker, so this file is imported on the nodes, too.
"""

from __future__ import annotations

import math
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import cloudpickle

from pybackend.core.errors import ClusterError
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Emit
from pybackend.core.job.notice import Notice
from pybackend.core.launchers.base import Outcome
from pybackend.core.launchers.environment.installing import Interpreter
from pybackend.core.launchers.remote.bundle import LIBRARY
from pybackend.core.launchers.remote.group import Follow, Start, Way, run_group
from pybackend.core.launchers.remote.task import REPORT, TASK, RemoteTask, read_post, take_part
from pybackend.core.launchers.slurm import commands
from pybackend.core.launchers.slurm.watch import JobFiles, SlurmWatch
from pybackend.core.machine import own_address
from pybackend.core.machine.capacity import list_gpus
from pybackend.core.machine.janitor import guarded
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.meeting_client import MeetingClient
from pybackend.core.net.rendezvous import split_address


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
        return commands.as_count(self.options.get(commands.PER_NODE))

    @property
    def is_shared(self) -> bool:
        """True if the workers of elastic training are steps of one job, not jobs of their own."""
        return self.nodes is not None or self.per_node is not None

    def count_places(self, workers: int) -> int:
        """Return the number of tasks in a job for at most ``workers`` elastic workers.

        Raises `InputError` if there are more workers than tasks.
        """
        tasks = commands.count_tasks(self.nodes, self.per_node)
        if tasks is not None and self.per_node is not None and tasks < workers:
            commands.check_tasks(workers, self.nodes, self.per_node)
        return max(workers, tasks or 0)


SCRIPT = "job.sh"
# For a last checkpoint before the job's time limit.
_NOTICE_SECONDS = 60
# Not `python -m`: with it, files in the current directory would shadow installed modules.
_START = (
    "import sys; from pathlib import Path; folder = Path(sys.argv[1]); "
    f"sys.path[0] = str(folder / '{LIBRARY}'); "
    "from pybackend.core.launchers.slurm.jobs import main; "
    "sys.exit(main(folder, Path(sys.argv[2])))"
)
# A shell that waits for the end of its input; a line of text means that the job has ended already.
# Slurm's controller may be unavailable for a moment.
_CANCEL = (
    "read -r _ || for try in 1 2 3 4 5; do "
    'scancel --quiet --name="$0" --user="$(id -un)" && break; sleep 3; done'
)
# For a step of one of the first workers to get a node; the others may wait until one is free.
_BUSY_SECONDS = 60.0
# For a step whose worker has reported; then for one that gets SIGTERM.
_END_SECONDS = 10.0
_KILL_SECONDS = 60.0
# The driver touches a file, because a driver that was killed with its host cannot cancel its job.
_ALIVE = "alive"
_TOUCH_SECONDS = 60.0
_SILENT_MINUTES = 60
# Steps get their memory by core or by GPU, like their job, or share that of their job.
_MEMORY = ("mem-per-cpu", "mem-per-gpu")


@dataclass(frozen=True)
class JobWay(Way):
    """A `Way` that submits a job with a task for each worker; the names begin with ``name``."""

    settings: SlurmSettings
    address: str
    token: str
    name: str
    folder: Path

    def name_host(self, number: int, place: int) -> str:
        return self._files(number)[0]

    def listen(self, workers: int) -> MeetingServer:
        return MeetingServer(self.address, self.token, workers)

    @contextmanager
    def open(self, start: Start) -> Iterator[Follow]:
        own, job, name = self.prepare(start), start.job, start.name(self.name)
        options = describe_job(self.settings, name, own, job.can_go_on)
        path = own.folder / SCRIPT
        path.write_text(describe_script(self.settings, self.folder, own, options))
        with cancelled_at_end(name) as let_go:
            watch = self.watch(commands.submit(path), start, own, options)

            def follow(on_event: Emit) -> Outcome:
                given = (start.meeting, job, own, on_event, watch.look)
                outcome = run_group(*given, explain=watch.explain)
                let_go()
                return outcome

            yield follow

    def watch(
        self, number: str, start: Start, own: JobFiles, options: Mapping[str, Any], *more: Any
    ) -> SlurmWatch:
        seconds = commands.notice_seconds(options["signal"])
        given = (number, own, start.meeting, start.note, self.settings.patience, seconds)
        return SlurmWatch(*given, *more)

    def prepare(self, start: Start) -> JobFiles:
        own = self._files(start.number, start.job.workers)
        own.folder.mkdir(exist_ok=True)
        for name, content in {DRIVER: start.meeting.address.encode(), **start.post()}.items():
            (own.folder / name).write_bytes(content)
        return own

    def _files(self, number: int | None, workers: int = 1) -> JobFiles:
        own = self.folder if number is None else self.folder / f"worker-{number}"
        return JobFiles(own, workers)


@dataclass(frozen=True)
class StepWay(JobWay):
    """A `Way` that starts a step for each elastic worker, in a job with room for all.

    It runs srun on this machine, so that any node of the job may fail. ``options`` are the sbatch
    options of the job. ``workers`` is the number of workers that must get a node before training
    can begin.
    """

    number: str
    options: dict[str, Any]
    workers: int

    @contextmanager
    def open(self, start: Start) -> Iterator[Follow]:
        own, meeting, job = self.prepare(start), start.meeting, start.job
        assert start.number is not None
        step = Step(self._command(own), own.batch_log)
        busy_seconds = _BUSY_SECONDS if start.number < self.workers else math.inf
        more = (step.start, step.has_ended, busy_seconds)
        watch = self.watch(self.number, start, own, self.options, *more)
        try:
            yield partial(run_group, meeting, job, own, look=watch.look, explain=watch.explain)
        finally:
            step.end(_END_SECONDS if meeting.result(0, REPORT) is not None else 0.0)

    def _command(self, own: JobFiles) -> list[str]:
        given = self.options
        memory = {name: given[name] for name in _MEMORY if name in given} or {"mem": 0}
        one = {"jobid": self.number, "nodes": 1, "ntasks": 1}
        command = worker_command(self.settings, self.folder, own)
        script = "\n".join(script_lines(self.settings, command))
        options = {**one, **step_options(self.settings, own), **memory}
        return commands.srun(options, ["--exact", "/bin/bash", "-c", script])


class Step:
    """A step that srun starts from this machine. ``log`` is for what srun itself prints."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._process is not None:
            return
        try:
            with self._log.open("ab") as log:
                self._process = subprocess.Popen(
                    self._command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=commands.own_variables(),
                    start_new_session=True,  # Ctrl-C is for this process
                )
        except OSError as error:
            raise ClusterError(f"srun cannot be started on this machine: {error}") from error

    def has_ended(self) -> bool:
        return self._process is not None and self._process.poll() is not None

    def end(self, seconds: float) -> None:
        """End it, unless it ends within some seconds."""
        if (process := self._process) is None:
            return
        for limit, end in ((seconds, process.terminate), (_KILL_SECONDS, process.kill)):
            with suppress(subprocess.TimeoutExpired):
                process.wait(limit)
                return
            end()
        process.wait()


@contextmanager
def with_steps(way: JobWay, job: TrainingJob) -> Iterator[StepWay]:
    """Submit a job in which each elastic worker can be a step; on exit, cancel it."""
    options, script = describe_shared(way.settings, way.name, job, way.folder)
    path = way.folder / SCRIPT
    path.write_text(script)
    common = (way.settings, way.address, way.token, way.name, way.folder)
    with cancelled_at_end(way.name), _kept_alive(way.folder / _ALIVE):
        yield StepWay(*common, commands.submit(path), options, job.workers)


def describe_shared(
    settings: SlurmSettings, name: str, job: TrainingJob, folder: Path
) -> tuple[dict[str, Any], str]:
    """Return options and script of a job for `StepWay`.

    It waits, even after a node has failed, until its driver ends or has been silent for an hour.
    """
    files = JobFiles(folder, settings.count_places(job.most_workers))
    options = {**describe_job(settings, name, files, job.can_go_on), "no-kill": True}
    alive = shlex.quote(str(folder / _ALIVE))
    is_alive = f'[ -n "$(find {alive} -mmin -{_SILENT_MINUTES} 2>/dev/null)" ]'
    waiting = f"while {is_alive}; do sleep 20; done"
    return options, commands.batch_script(options, [waiting])


@contextmanager
def _kept_alive(file: Path) -> Iterator[None]:
    """Show in a file that this process is alive: if it is killed, nothing else may end the job."""
    has_ended = threading.Event()

    def touch() -> None:
        while not has_ended.wait(_TOUCH_SECONDS):
            with suppress(OSError):
                file.touch()

    file.touch()
    threading.Thread(target=touch, daemon=True).start()
    try:
        yield
    finally:
        has_ended.set()


def cancelled_at_end(name: str) -> AbstractContextManager[Callable[[], None]]:
    """Cancel the jobs with a name at the end of a block, even if this process is killed.

    Yields a function that calls this off.
    """
    return guarded(["/bin/sh", "-c", _CANCEL, name])


def describe_job(
    settings: SlurmSettings, name: str, files: JobFiles, can_go_on: bool
) -> dict[str, Any]:
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
        "signal": commands.signal_option(settings.time, _NOTICE_SECONDS) if can_go_on else None,
        **settings.options,
    }


def describe_script(
    settings: SlurmSettings, folder: Path, files: JobFiles, options: Mapping[str, Any]
) -> str:
    command = commands.srun(step_options(settings, files), worker_command(settings, folder, files))
    return commands.batch_script(options, script_lines(settings, command))


def step_options(settings: SlurmSettings, files: JobFiles) -> dict[str, Any]:
    # srun no longer reads the first two from sbatch's variables.
    return {
        "cpus-per-task": settings.cpus,
        "gpus-per-task": settings.gpus or None,
        "output": files.task_log,
    }


def script_lines(settings: SlurmSettings, command: Sequence[str]) -> list[str]:
    # A failure of `module load` must end the script.
    setup = ["set -e", settings.setup, "set +e"] if settings.setup else []
    return [*setup, f"exec {shlex.join(command)}"]


def worker_command(settings: SlurmSettings, folder: Path, files: JobFiles) -> list[str]:
    found = settings.interpreter
    start = [settings.python] if found is None else [*found.start(), found.python]
    return [*start, "-u", "-c", _START, str(folder), str(files.folder)]


# File with the address of the driver.
DRIVER = "driver"
_DRIVER_SECONDS = 30.0
# Sent to this process by itself, to end even if it waits after a SIGTERM.
_LOST_DRIVER = signal.SIGHUP


def main(folder: Path, own: Path) -> int:
    """Run one worker on a node, where srun started it, and return the exit status of its task.

    ``folder`` has the files for all workers, ``own`` those for this job; the nodes and the driver
    share both. Raises `ClusterError` if the driver cannot be reached.
    """
    for number in (signal.SIGTERM, _LOST_DRIVER):
        signal.signal(number, _end)
    if not os.path.isdir(os.environ.get("TMPDIR", "/")):  # sbatch forwards the login node's
        del os.environ["TMPDIR"]
    # Pickled by the driver, in a folder that only its user can access.
    task: RemoteTask = cloudpickle.loads((folder / TASK).read_bytes())
    task = replace(task, hosts=commands.hosts_by_rank(os.environ))
    notice = Notice()
    if task.member.job.can_go_on:  # the worker saves its state, and ends by itself
        signal.signal(signal.SIGTERM, notice.take)
    rank, token = int(os.environ["SLURM_PROCID"]), task.member.token
    post, driver = read_post(own), (own / DRIVER).read_text()
    with MeetingClient(driver, token, rank, _DRIVER_SECONDS, _end_at_once) as meeting:
        meeting.wait_until_settled(_DRIVER_SECONDS + 5)
        if meeting.error is not None:
            raise ClusterError(
                f"worker {rank} cannot reach the driver at {driver}: {meeting.error}. Pass slurm() "
                "an `address` of the driver's machine that the nodes can reach"
            )
        # Slurm restricts a task that requested GPUs to those.
        own_gpus = list_gpus({"CUDA_VISIBLE_DEVICES": "", **os.environ})
        gpus = None if task.member.job.resources.gpus is None else own_gpus
        cores = commands.count_cores(os.environ)
        # Hosts of the other workers are in other steps or jobs.
        reached = own_address(split_address(driver)[0]) if post else None
        arguments = (task, rank, [folder], meeting, cores, gpus, reached, notice, post)
        return 0 if take_part(*arguments) else 1


def _end(*_: object) -> NoReturn:
    sys.exit("Slurm or the driver ended the job")  # which ends the worker and removes its folder


def _end_at_once() -> None:
    os.kill(os.getpid(), _LOST_DRIVER)
