"""Batch script that runs `tfdist run` as a Slurm job, and the next run of a preempted one."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping

from pybackend.errors import ClusterError, InputError
from pybackend.launchers.script.messages import read_script
from pybackend.launchers.script.plan import split_variable
from pybackend.launchers.slurm.queue import ask, batch_script, read_job, signal_option
from pybackend.launchers.slurm.settings import PER_NODE, as_count, check_tasks
from pybackend.words import show

# Options of `tfdist run` with a value that are passed to the job unchanged.
_PASSED_ON = ("show", "output_dir", "grace", "max_restarts")
_LAST_SECONDS = 20.0
# Set by the script that `describe_batch` returns, if it has --requeue.
_WANTED = "TFDIST_REQUEUE"
# Options of sbatch that conflict with those of `tfdist run`.
_OURS = {
    "chdir": "use --cwd of `tfdist run`",
    "ntasks": "that is the number of ranks; use -w",
    "wrap": "the script is what `tfdist run` starts",
}


def describe_batch(options: argparse.Namespace) -> str:
    """Return the script for sbatch; ``options`` are those of `tfdist run`, including ``sbatch``.

    Raises
    ------
    InputError
        The number of ranks is missing, or conflicts with an sbatch option.
    """
    script = read_script(options.script, options.is_module)
    if options.workers is None or options.workers < 1:
        raise InputError("--sbatch needs the number of ranks, as in -w 8")
    if options.hosts or options.hostfile or options.index is not None:
        raise InputError("with --sbatch, Slurm chooses the hosts: remove the hosts and --index")
    given = dict(_split(word) for word in shlex.split(options.sbatch))
    head = {
        "job-name": "tfdist",
        "ntasks": options.workers,
        # The signal reaches all ranks, which end within the grace period; then the job ends.
        "signal": signal_option(given.get("time"), options.grace + _LAST_SECONDS, "B:"),
    }
    check_tasks(options.workers, as_count(given.get("nodes")), as_count(given.get(PER_NODE)))
    words = ["--workers", str(options.workers), "--cwd", os.path.abspath(options.cwd or os.curdir)]
    for name in _PASSED_ON:
        value = getattr(options, name)
        words += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    for variable in options.env:
        split_variable(variable)
        words += ["--env", variable]
    words += [*(["-m"] if script.kind == "module" else []), "--", script.name, *script.arguments]
    command = shlex.join([sys.executable, "-m", "pybackend", "run", *words])
    # With `exec`, signals to the batch script reach `tfdist run`.
    wanted = [f"export {_WANTED}=1"] if given.get("requeue") else []
    return batch_script({**head, **given}, [*wanted, f"exec {command}"])


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
    is_late = state.seconds_left < seconds and _WANTED in environment
    if not re.search(r" Requeue=1( |$)", shown) or not (state.is_preempted or is_late):
        return False
    ask("scontrol", "requeue", number)
    return True


def _split(word: str) -> tuple[str, str | bool]:
    name, equals, value = word.removeprefix("--").partition("=")
    if not word.startswith("--") or not name:
        raise InputError(f"--sbatch has {show(word)}: expected long options, as in --time=2:00:00")
    if name in _OURS:
        raise InputError(f"--sbatch cannot have --{name}: {_OURS[name]}")
    return name, value if equals else True
