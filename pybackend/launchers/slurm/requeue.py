"""A batch job that has ended early, because it was told to, goes back to the queue."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pybackend.errors import ClusterError
from pybackend.launchers.slurm.queue import ask, read_job

# Set by the script that `tfdist run --sbatch` prints, if the user wants --requeue.
WANTED = "TFDIST_REQUEUE"


def requeue_told(environment: Mapping[str, str], seconds: float) -> str:
    """Have Slurm start this job again if it was told to end; what was done, in words.

    Slurm does so by itself, but only with a job that stays until it is ended. It ends this process.

    Parameters
    ----------
    environment
        Of this process; without a job there is nothing to do.
    seconds
        Left of the job's time, or fewer, if it was told to end because of that.
    """
    number = environment.get("SLURM_JOB_ID")
    if number is None:
        return ""
    try:
        shown = ask("scontrol", "show", "job", "--oneliner", number)
        state = read_job(shown)
        is_late = state.seconds_left < seconds and WANTED in environment
        if not re.search(r" Requeue=1( |$)", shown) or not (state.is_preempted or is_late):
            return ""
        ask("scontrol", "requeue", number)
    except ClusterError as error:
        return f"Slurm job {number} was not requeued: {error}"
    return f"Slurm job {number} was requeued: it will start again"
