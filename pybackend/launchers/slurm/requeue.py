"""A batch job that has ended early, because it was told to, goes back to the queue."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pybackend.errors import ClusterError
from pybackend.launchers.slurm.queue import ask, read_job

# Set by the script that `tfdist run --sbatch` prints, if the user wants --requeue.
WANTED = "TFDIST_REQUEUE"


def requeue_told(environment: Mapping[str, str], seconds: float) -> bool:
    """Have Slurm start this job again if it was told to end; whether Slurm does.

    By itself it does so only with a job that stays until it is ended. In either case it ends this
    process now, which has to stay until then: Slurm could take its end for that of the next run.

    Parameters
    ----------
    environment
        Of this process; without a job there is nothing to do.
    seconds
        Left of the job's time, or fewer, if it was told to end because of that.

    Raises
    ------
    ClusterError
        Slurm does not answer, or does not want to.
    """
    if "SLURM_JOB_ID" not in environment:
        return False
    try:
        return _requeue(environment, seconds)
    except ClusterError:
        # As the job's grace ends, Slurm requeues it itself, and ends a `scontrol` in it, too.
        return _requeue(environment, seconds)


def _requeue(environment: Mapping[str, str], seconds: float) -> bool:
    number = environment["SLURM_JOB_ID"]
    shown = ask("scontrol", "show", "job", "--oneliner", number)
    state = read_job(shown)
    if state.restarts > int(environment.get("SLURM_RESTART_COUNT") or 0):
        return True
    is_late = state.seconds_left < seconds and WANTED in environment
    if not re.search(r" Requeue=1( |$)", shown) or not (state.is_preempted or is_late):
        return False
    ask("scontrol", "requeue", number)
    return True
