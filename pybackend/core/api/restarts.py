"""Restart a training run after losing a worker, with any launcher."""

from __future__ import annotations

import time
from dataclasses import replace

from pybackend.core.api.progress import Timeline, printer
from pybackend.core.api.request import Request
from pybackend.core.errors import ClusterError, WorkerFailedError
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Emit, Event, Note, Resumed
from pybackend.core.job.report import Restart
from pybackend.core.job.storage_options import Recovery
from pybackend.core.launchers import Launcher, Outcome


def run_with_restarts(
    request: Request[TrainingJob],
    launcher: Launcher,
    recovery: Recovery,
    listen: Emit = lambda event: None,
    say: Emit | None = None,
) -> Outcome:
    """Run a training run; if a worker is lost, run it again from the newest checkpoint.

    After the first run, an error at the start is also retried: a host may be rebooting.

    Parameters
    ----------
    recovery
        Has the maximum number of restarts, and the pause before them.
    listen
        Receives the events of all runs.
    say
        Shows a note about each restart. None (default): as ``verbose`` of the job says.

    Returns
    -------
    Outcome
        Outcome of the last run, with a record of all restarts.

    Raises
    ------
    WorkerFailedError
        The last run failed, or any run failed because of the code that a worker ran.
    ClusterError
        The workers could not be started in the first run, or in later runs until no restarts were
        left.
    """
    show, checkpoint = say or printer(request.job.verbose), request.job.checkpoint
    is_kept = checkpoint is not None
    where = "the newest checkpoint" if is_kept else "the beginning"
    losses: list[Restart] = []
    timeline = Timeline()
    restarts = recovery.restarts

    def note(event: Event) -> None:
        if isinstance(event, Resumed) and losses:
            losses[-1] = replace(losses[-1], checkpoint=event.place)
        listen(event)

    def run() -> Outcome:
        outcome = request.run(launcher, note, timeline)
        return replace(outcome, restarts=tuple(losses))

    for number in range(1, restarts + 1):
        try:
            return run()
        except (WorkerFailedError, ClusterError) as error:
            is_loss = isinstance(error, WorkerFailedError) and error.is_loss(is_saved=is_kept)
            if not is_loss and (isinstance(error, WorkerFailedError) or number == 1):
                raise
            lost = str(error).partition("\n")[0]
            losses.append(Restart(time.time(), lost))
            show(Note(f"{lost}; restarting from {where} (restart {number} of {restarts})"))
        if not is_loss:
            time.sleep(recovery.pause * (number - 1))
        if checkpoint is not None:
            resuming = replace(checkpoint, resume=True)
            request = replace(request, job=replace(request.job, checkpoint=resuming))
    return run()
