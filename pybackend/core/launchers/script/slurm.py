"""`tfdist run` on Slurm: ranks that are the tasks of a step, and the script of a batch job."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Mapping
from typing import NoReturn

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.launchers.package_files import run_here
from pybackend.core.launchers.script import ranks as scripts
from pybackend.core.launchers.shares import limit_threads
from pybackend.core.launchers.slurm import commands
from pybackend.core.tf_config import make_tf_config
from pybackend.core.words import show

# In an allocation: all ranks are the tasks of one step.


def find_step_site(environment: Mapping[str, str], workers: int | None) -> scripts.HostRanks | None:
    """Return the ranks as a step; None outside an allocation, or if it is for a single task.

    ``workers`` is the number of ranks (None: that of the allocation's tasks). Raises `InputError`
    if srun started several copies of this process.
    """
    if int(environment.get("SLURM_STEP_NUM_TASKS") or 1) > 1:
        raise InputError(
            "srun started `tfdist run` several times, and each would start all ranks: start it "
            "once, without srun; it calls srun itself"
        )
    tasks = int(environment.get("SLURM_NTASKS") or environment.get("SLURM_NNODES") or 1)
    if "SLURM_JOB_ID" not in environment or tasks < 2:
        return None
    ranks = tuple(range(workers or tasks))
    name = f"the nodes of Slurm job {environment['SLURM_JOB_ID']}"
    return scripts.HostRanks(name, ranks, None, is_step=True)


def step_command(
    task: scripts.ScriptRun | scripts.ScriptTask, ranks: int, name: str, given: Mapping[str, str]
) -> list[str]:
    """Return the command that starts all ranks.

    ``name`` is that of the step. ``given`` are the variables of this process, which may be part of
    a step.
    """
    options = {
        "ntasks": ranks,
        "job-name": name,
        "chdir": task.folder,
        "input": "none",
        # srun no longer reads it from sbatch's variables.
        "cpus-per-task": given.get("SLURM_CPUS_PER_TASK"),
    }
    flags = ["--label", *(["--overlap"] if "SLURM_STEP_ID" in given else [])]
    words = task.script.command(sys.executable)
    return commands.srun(options, [*flags, *run_here("launchers.script.slurm", *words)])


def describe_step(
    plan: scripts.ScriptRun, site: scripts.HostRanks, environment: Mapping[str, str]
) -> Iterator[str]:
    yield f"ranks 0 to {len(site.ranks) - 1} on {site.name}:"
    for name, value in {**plan.variables, "TFDIST_SECRET": "<secret>"}.items():
        yield f"  export {name}={shlex.quote(value)}"
    yield f"  {shlex.join(step_command(plan, len(site.ranks), 'tfdist', environment))}"


# On a node: one rank, with its place and cores from Slurm's variables.


def main(*command: str) -> NoReturn:
    """Exec a command with the variables of its worker group, so that it gets Slurm's signals."""
    os.environ.update(group_variables(os.environ))
    sys.stdout.flush()
    os.execvp(command[0], command)  # noqa: S606 (the purpose)


def group_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables from which a task's script finds its worker group.

    GPUs are not included, because Slurm restricts each task to its own GPUs.
    """
    rank, hosts = int(environment["SLURM_PROCID"]), commands.hosts_by_rank(environment)
    port = commands.step_port(environment)
    # Ranks of one host are consecutive, and have different ports.
    addresses = [f"{host}:{port + r - hosts.index(host)}" for r, host in enumerate(hosts)]
    limits = limit_threads(commands.count_cores(environment))
    # A job that Slurm requeued counts as a restart, too.
    restarts = (environment.get(name) or 0 for name in ("TFDIST_RESTART", "SLURM_RESTART_COUNT"))
    return {
        "TF_CONFIG": make_tf_config(addresses, rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(commands.count_local(environment)),
        "TFDIST_RESTART": str(sum(map(int, restarts))),
        **{name: environment.get(name, cores) for name, cores in limits.items()},
    }


# A batch job that runs `tfdist run`.

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

    Raises `InputError` if the number of ranks is missing, or conflicts with an sbatch option.
    """
    script = scripts.read_script(options.script, options.is_module)
    if options.workers is None or options.workers < 1:
        raise InputError("--sbatch needs the number of ranks, as in -w 8")
    if options.hosts or options.hostfile or options.index is not None:
        raise InputError("with --sbatch, Slurm chooses the hosts: remove the hosts and --index")
    given = dict(_split(word) for word in shlex.split(options.sbatch))
    head = {
        "job-name": "tfdist",
        "ntasks": options.workers,
        # The signal reaches all ranks, which end within the grace period; then the job ends.
        "signal": commands.signal_option(given.get("time"), options.grace + _LAST_SECONDS, "B:"),
    }
    counts = (commands.as_count(given.get(name)) for name in ("nodes", commands.PER_NODE))
    commands.check_tasks(options.workers, *counts)
    words = ["--workers", str(options.workers), "--cwd", os.path.abspath(options.cwd or os.curdir)]
    for name in _PASSED_ON:
        if (value := getattr(options, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    for variable in options.env:
        scripts.split_variable(variable)
        words += ["--env", variable]
    words += ["-m"] if script.kind == "module" else []
    run = [sys.executable, "-m", "pybackend", "run", *words, "--", script.name, *script.arguments]
    # With `exec`, signals to the batch script reach `tfdist run`.
    wanted = [f"export {_WANTED}=1"] if given.get("requeue") else []
    return commands.batch_script({**head, **given}, [*wanted, f"exec {shlex.join(run)}"])


def requeue_preempted(environment: Mapping[str, str], seconds: float) -> bool:
    """Requeue this job if it was preempted or is out of time; return whether Slurm requeues it.

    Slurm requeues a job on its own only if the job runs until Slurm ends it. In both cases Slurm is
    about to end this process, which must not exit earlier: Slurm could mistake that for the end of
    the next run. Nothing is done outside a job. ``seconds`` is the most time that can be left when
    a job receives SIGTERM because of its time limit. Raises `ClusterError` if Slurm does not
    respond, or rejects the request.
    """
    if "SLURM_JOB_ID" not in environment:
        return False
    # Twice: when the job's grace period ends, Slurm requeues it itself, and kills its `scontrol`.
    with contextlib.suppress(ClusterError):
        return _requeue(environment, seconds)
    return _requeue(environment, seconds)


def _requeue(environment: Mapping[str, str], seconds: float) -> bool:
    number = environment["SLURM_JOB_ID"]
    state = commands.show_job(number)
    if state.restarts > int(environment.get("SLURM_RESTART_COUNT") or 0):
        return True
    is_late = state.seconds_left < seconds and _WANTED in environment
    if not state.can_requeue or not (state.is_preempted or is_late):
        return False
    # Of an array, Slurm shows all jobs: the first one may be another.
    commands.ask("scontrol", "requeue", number)
    return True


def _split(word: str) -> tuple[str, str | bool]:
    name, equals, value = word.removeprefix("--").partition("=")
    if not word.startswith("--") or not name:
        raise InputError(f"--sbatch has {show(word)}: expected long options, as in --time=2:00:00")
    if name in _OURS:
        raise InputError(f"--sbatch cannot have --{name}: {_OURS[name]}")
    return name, value if equals else True
