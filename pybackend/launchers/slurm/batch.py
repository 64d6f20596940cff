"""A batch script that does what `tfdist run` would do, when Slurm has room for it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys

from pybackend.errors import InputError
from pybackend.launchers.script.command import read_script
from pybackend.launchers.script.variables import split_variable
from pybackend.launchers.slurm.notice import signal_option
from pybackend.launchers.slurm.requeue import WANTED
from pybackend.launchers.slurm.script import batch_script
from pybackend.launchers.slurm.tasks import PER_NODE, as_count, check_tasks

# Options of `tfdist run` with a value that mean the same in the job.
_PASSED_ON = ("show", "output_dir", "grace", "max_restarts")
_LAST_SECONDS = 20.0
# Options of sbatch that would contradict those of `tfdist run`.
_OURS = {
    "chdir": "use --cwd of `tfdist run`",
    "ntasks": "that is the number of ranks; use -w",
    "wrap": "the script is what `tfdist run` starts",
}


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
