"""A batch script that does what `tfdist run` would do, when Slurm has room for it."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from pybackend.errors import ClusterError, InputError
from pybackend.launchers.script.command import read_script
from pybackend.launchers.script.variables import split_variable
from pybackend.launchers.slurm.notice import signal_option
from pybackend.launchers.slurm.queue import ask, read_job
from pybackend.launchers.slurm.settings import PER_NODE, as_count, check_tasks

# Options of `tfdist run` with a value that mean the same in the job.
_PASSED_ON = ("show", "output_dir", "grace", "max_restarts")
_LAST_SECONDS = 20.0
# Options of sbatch that would contradict those of `tfdist run`.
_OURS = {
    "chdir": "use --cwd of `tfdist run`",
    "ntasks": "that is the number of ranks; use -w",
    "wrap": "the script is what `tfdist run` starts",
}
# Set by the script that `tfdist run --sbatch` prints, if the user wants --requeue.
WANTED = "TFDIST_REQUEUE"


def describe_batch(options: argparse.Namespace) -> str:
    """The script for sbatch; ``options`` are those of `tfdist run`, with ``sbatch`` among them.

    Raises
    ------
    InputError
        It is not said how many ranks there are to be, or an option of sbatch contradicts that.
    """
    script = read_script(options.script, options.is_module)
    if options.workers is None or options.workers < 1:
        raise InputError("--sbatch needs the number of ranks, as in -w 8")
    if options.hosts or options.hostfile or options.index is not None:
        raise InputError("with --sbatch Slurm chooses the hosts: leave them and --index out")
    given = dict(_split(word) for word in shlex.split(options.sbatch))
    head = {
        "job-name": "tfdist",
        "ntasks": options.workers,
        # All ranks are told then, and have the grace to end; a last moment is for the rest.
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
    # What Slurm says to the batch script, it says to `tfdist run`.
    wanted = [f"export {WANTED}=1"] if given.get("requeue") else []
    return batch_script({**head, **given}, [*wanted, f"exec {command}"])


def _split(word: str) -> tuple[str, str | bool]:
    name, equals, value = word.removeprefix("--").partition("=")
    if not word.startswith("--") or not name:
        raise InputError(f"--sbatch has {word!r}: expected long options, as in --time=2:00:00")
    if name in _OURS:
        raise InputError(f"--sbatch cannot have --{name}: {_OURS[name]}")
    return name, value if equals else True


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


def batch_script(options: Mapping[str, Any], lines: Sequence[str]) -> str:
    """A script with sbatch's options in it.

    Parameters
    ----------
    options
        sbatch's long options; True for one without a value, None for none at all.
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
    """The command that starts one task per worker, and ends all if one fails."""
    given = {"kill-on-bad-exit": 1, "distribution": "block", "mpi": "none", **options}
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return ["srun", *flags, *command]


def _quote(value: Any) -> str:
    """sbatch splits its lines in the script as a shell would."""
    return shlex.quote(str(value))
