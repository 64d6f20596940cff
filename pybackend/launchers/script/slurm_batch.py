"""Batch script that runs `tfdist run` as a Slurm job."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from pybackend.errors import InputError
from pybackend.launchers.script.messages import read_script
from pybackend.launchers.script.plan import split_variable
from pybackend.launchers.slurm.queue import WANTED, batch_script, signal_option
from pybackend.launchers.slurm.settings import PER_NODE, as_count, check_tasks
from pybackend.words import show

# Options of `tfdist run` with a value that are passed to the job unchanged.
_PASSED_ON = ("show", "output_dir", "grace", "max_restarts")
_LAST_SECONDS = 20.0
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
    wanted = [f"export {WANTED}=1"] if given.get("requeue") else []
    return batch_script({**head, **given}, [*wanted, f"exec {command}"])


def _split(word: str) -> tuple[str, str | bool]:
    name, equals, value = word.removeprefix("--").partition("=")
    if not word.startswith("--") or not name:
        raise InputError(f"--sbatch has {show(word)}: expected long options, as in --time=2:00:00")
    if name in _OURS:
        raise InputError(f"--sbatch cannot have --{name}: {_OURS[name]}")
    return name, value if equals else True
