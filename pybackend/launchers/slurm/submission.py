"""A job of workers: its options, its batch script, and its life from sbatch to scancel."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from pybackend.job.job import Job
from pybackend.job.messages import Emit
from pybackend.launchers.base import Outcome
from pybackend.launchers.remote.bundle import LIBRARY
from pybackend.launchers.remote.group import run_group
from pybackend.launchers.slurm.batch import batch_script, srun
from pybackend.launchers.slurm.queue import notice_seconds, signal_option, submit
from pybackend.launchers.slurm.settings import SlurmSettings
from pybackend.launchers.slurm.watch import JobFiles, SlurmWatch
from pybackend.machine.janitor import guarded
from pybackend.net.meeting import MeetingServer

SCRIPT = "job.sh"
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


@contextmanager
def submitted(
    settings: SlurmSettings,
    name: str,
    job: Job,
    meeting: MeetingServer,
    folder: Path,
    own: JobFiles,
    on_note: Emit,
) -> Iterator[Callable[..., Outcome]]:
    """Submit a job, and yield a function that waits for its workers. On exit, cancel the job."""
    options = describe_job(settings, name, own, job.can_go_on)
    path = own.folder / SCRIPT
    path.write_text(describe_script(settings, folder, own, options))
    with cancelled_at_end(name) as let_go:
        number, seconds = submit(path), notice_seconds(options["signal"])
        watch = SlurmWatch(number, own, meeting, on_note, settings.patience, seconds)

        def follow(**options: Any) -> Outcome:
            outcome = run_group(
                meeting, job, own, look=watch.look, explain=watch.explain, **options
            )
            let_go()
            return outcome

        yield follow


def cancelled_at_end(name: str) -> AbstractContextManager[Callable[[], None]]:
    """Cancel the jobs with a name at the end of a block, even if this process is killed.

    Yields a function that calls this off.
    """
    return guarded(["/bin/sh", "-c", _CANCEL, name])


def describe_job(
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


def describe_script(
    settings: SlurmSettings, folder: Path, files: JobFiles, options: Mapping[str, Any]
) -> str:
    """Return the batch script that starts all workers."""
    command = srun(step_options(settings, files), worker_command(settings, folder, files))
    return batch_script(options, [*setup_lines(settings), f"exec {shlex.join(command)}"])


def step_options(settings: SlurmSettings, files: JobFiles) -> dict[str, Any]:
    """Return options of srun, which no longer reads them from sbatch's variables."""
    return {
        "cpus-per-task": settings.cpus,
        "gpus-per-task": settings.gpus or None,
        "output": files.task_log,
    }


def setup_lines(settings: SlurmSettings) -> list[str]:
    """Return shell commands to run first. A failure of `module load` must end the script."""
    return ["set -e", settings.setup, "set +e"] if settings.setup else []


def worker_command(settings: SlurmSettings, folder: Path, files: JobFiles) -> list[str]:
    """Return the command of one task."""
    found = settings.interpreter
    start = [settings.python] if found is None else [*found.start(), found.python]
    return [*start, "-u", "-c", _START, str(folder), str(files.folder)]
