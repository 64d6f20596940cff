"""Workers of elastic training on Slurm: each is a job of its own, or a step of a common job."""

from __future__ import annotations

import math
import shlex
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pybackend.errors import ClusterError
from pybackend.job.job import TrainingJob
from pybackend.job.messages import Emit
from pybackend.launchers.remote.elastic_site import Follow, as_group
from pybackend.launchers.remote.elastic_task import POST, Post
from pybackend.launchers.remote.group import run_group
from pybackend.launchers.remote.task import REPORT
from pybackend.launchers.slurm.batch import batch_script, srun
from pybackend.launchers.slurm.queue import notice_seconds, own_variables, submit
from pybackend.launchers.slurm.settings import SlurmSettings
from pybackend.launchers.slurm.submission import (
    SCRIPT,
    cancelled_at_end,
    describe_job,
    setup_lines,
    step_options,
    submitted,
    worker_command,
)
from pybackend.launchers.slurm.watch import JobFiles, SlurmWatch
from pybackend.net.meeting import MeetingServer

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
class _SlurmWay:
    """Common parts of both ways to start a worker."""

    settings: SlurmSettings
    address: str
    token: str
    job: TrainingJob
    folder: Path

    def name_host(self, number: int, place: int) -> str:
        return _files_of(self.folder, number)[0]

    def make_meeting(self) -> MeetingServer:
        return MeetingServer(self.address, self.token, 1)


@dataclass(frozen=True)
class JobWay(_SlurmWay):
    """A `Way` that submits a one-task job for each worker; their names begin with ``name``."""

    name: str

    def open(
        self, number: int, place: int, meeting: MeetingServer, note: Emit
    ) -> AbstractContextManager[Follow]:
        own = _prepare(self.folder, number, meeting)
        name, job = f"{self.name}-{number}", as_group(self.job)
        return submitted(self.settings, name, job, meeting, self.folder, own, note)


@dataclass(frozen=True)
class StepWay(_SlurmWay):
    """A `Way` that starts a step of one task for each worker, in a job with room for all.

    srun runs on this machine, so that any node of the job may fail.

    Attributes
    ----------
    number
        Job ID.
    options
        sbatch options of the job.
    """

    number: str
    options: dict[str, Any]

    @contextmanager
    def open(self, number: int, place: int, meeting: MeetingServer, note: Emit) -> Iterator[Follow]:
        own = _prepare(self.folder, number, meeting)
        seconds = notice_seconds(self.options["signal"])
        command = _step_command(self.settings, self.options, self.number, self.folder, own)
        step, patience = Step(command, own.batch_log), self.settings.patience
        watch = SlurmWatch(
            self.number,
            own,
            meeting,
            note,
            patience,
            seconds,
            step.start,
            step.has_ended,
            _BUSY_SECONDS if number < self.job.workers else math.inf,
        )
        try:
            yield partial(
                run_group, meeting, as_group(self.job), own, look=watch.look, explain=watch.explain
            )
        finally:
            step.end(_END_SECONDS if meeting.result(0, REPORT) is not None else 0.0)


class Step:
    """A step that srun starts from this machine.

    Parameters
    ----------
    command
        The command line of srun.
    log
        File for what srun itself prints.
    """

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self._command = command
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; a second call does nothing."""
        if self._process is None:
            try:
                with self._log.open("ab") as log:
                    self._process = subprocess.Popen(
                        self._command,
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=log,
                        env=own_variables(),
                        start_new_session=True,  # Ctrl-C is for this process
                    )
            except OSError as error:
                raise ClusterError(f"srun cannot be started on this machine: {error}") from error

    def has_ended(self) -> bool:
        """Return whether it was started, and has ended."""
        return self._process is not None and self._process.poll() is not None

    def end(self, seconds: float) -> None:
        """End it, unless it ends within some seconds."""
        process = self._process
        if process is None:
            return
        for limit, end in ((seconds, process.terminate), (_KILL_SECONDS, process.kill)):
            try:
                process.wait(limit)
                return
            except subprocess.TimeoutExpired:
                end()
        process.wait()


@contextmanager
def open_way(
    settings: SlurmSettings, address: str, token: str, name: str, job: TrainingJob, folder: Path
) -> Iterator[JobWay | StepWay]:
    """Yield a way to start workers, whose Slurm jobs have this name, or names that begin with it.

    A job for `StepWay` is submitted first, and cancelled at the end.
    """
    if not settings.is_shared:
        yield JobWay(settings, address, token, job, folder, name)
        return
    options, script = describe_shared(settings, name, job, folder)
    path = folder / SCRIPT
    path.write_text(script)
    with cancelled_at_end(name), _kept_alive(folder / _ALIVE):
        yield StepWay(settings, address, token, job, folder, submit(path), options)


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
    return options, batch_script(options, [waiting])


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


def _step_command(
    settings: SlurmSettings, options: dict[str, Any], number: str, folder: Path, own: JobFiles
) -> list[str]:
    memory = {name: options[name] for name in _MEMORY if name in options} or {"mem": 0}
    step = {"jobid": number, "nodes": 1, "ntasks": 1, **step_options(settings, own), **memory}
    command = shlex.join(worker_command(settings, folder, own))
    script = "\n".join([*setup_lines(settings), f"exec {command}"])
    return srun(step, ["--exact", "/bin/bash", "-c", script])


def _prepare(folder: Path, number: int, meeting: MeetingServer) -> JobFiles:
    """Create the folder of one worker."""
    own = _files_of(folder, number)
    own.folder.mkdir()
    (own.folder / POST).write_bytes(Post(number, driver=meeting.address).to_json())
    return own


def _files_of(folder: Path, number: int) -> JobFiles:
    return JobFiles(folder / f"worker-{number}", 1)
