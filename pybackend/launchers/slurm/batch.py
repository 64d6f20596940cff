"""Batch scripts, steps, and the next run of a preempted job."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from pybackend.errors import ClusterError
from pybackend.launchers.slurm.queue import ask, read_job

# Set by the script that `tfdist run --sbatch` prints, if it has --requeue.
WANTED = "TFDIST_REQUEUE"


def requeue_preempted(environment: Mapping[str, str], seconds: float) -> bool:
    """Requeue this job if it was preempted or is out of time; return whether Slurm requeues it.

    Slurm requeues a job on its own only if the job runs until Slurm ends it. In both cases Slurm is
    about to end this process, which must not exit earlier: Slurm could mistake that for the end of
    the next run.

    Parameters
    ----------
    environment
        Environment variables of this process; outside a job, nothing is done.
    seconds
        Maximum time that can be left when a job receives SIGTERM because of its time limit.

    Raises
    ------
    ClusterError
        Slurm does not respond, or rejects the request.
    """
    if "SLURM_JOB_ID" not in environment:
        return False
    try:
        return _requeue(environment, seconds)
    except ClusterError:
        # When the job's grace period ends, Slurm requeues it itself, and kills its `scontrol`.
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


def batch_script(options: Mapping[str, Any], lines: Sequence[str]) -> str:
    """Return a script that contains sbatch's options.

    Parameters
    ----------
    options
        sbatch's long options; True for an option without a value, None to omit it.
    lines
        Shell commands.
    """
    head = [
        f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={_quote(value)}"
        for name, value in options.items()
        if value is not None
    ]
    return "\n".join(["#!/bin/bash", *head, "", *lines, ""])


def srun(options: Mapping[str, Any], command: Sequence[str]) -> list[str]:
    """Return the command that starts one task per worker, and stops all tasks if one fails."""
    given = {"kill-on-bad-exit": 1, "distribution": "block", "mpi": "none", **options}
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return ["srun", *flags, *command]


def _quote(value: Any) -> str:
    """Quote a value for a line of the script, which sbatch splits as a shell does."""
    return shlex.quote(str(value))
