"""`tfdist run` in a Slurm allocation: all ranks are the tasks of one step."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pybackend.errors import InputError
from pybackend.launchers.package_files import run_here
from pybackend.launchers.script.messages import ScriptCommand
from pybackend.launchers.script.plan import HostRanks, ScriptRun
from pybackend.launchers.slurm.queue import srun


@dataclass(frozen=True)
class StepSite(HostRanks):
    """All ranks, on nodes that Slurm chooses from the allocation."""

    def command(self) -> list[str]:
        return run_here("launchers.script.slurm_agent")


def find_step_site(environment: Mapping[str, str], workers: int | None) -> StepSite | None:
    """Return the ranks as a step; None outside an allocation, or if it is for a single task.

    Parameters
    ----------
    workers
        Number of ranks; None: the number of tasks in the allocation.

    Raises
    ------
    InputError
        srun started several copies of this process.
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
    return StepSite(name, ranks, ranks, len(ranks), address=None)


def step_command(
    script: ScriptCommand, ranks: int, folder: str, name: str, environment: Mapping[str, str]
) -> list[str]:
    """Return the command that starts all ranks.

    Parameters
    ----------
    name
        Name of the step.
    environment
        Environment variables of this process, which may be part of a step.
    """
    options = {
        "ntasks": ranks,
        "job-name": name,
        "chdir": folder,
        "input": "none",
        # srun no longer reads it from sbatch's variables.
        "cpus-per-task": environment.get("SLURM_CPUS_PER_TASK"),
    }
    flags = ["--label", *(["--overlap"] if "SLURM_STEP_ID" in environment else [])]
    words = script.command(sys.executable, "Rscript")
    return srun(options, [*flags, *run_here("launchers.script.slurm_step", *words)])


def describe_step(
    plan: ScriptRun, site: HostRanks, environment: Mapping[str, str]
) -> Iterator[str]:
    """Yield lines of text that describe what would be started."""
    yield f"ranks 0 to {len(site.ranks) - 1} on {site.name}:"
    for name, value in {**plan.variables, "TFDIST_SECRET": "<secret>"}.items():
        yield f"  export {name}={shlex.quote(value)}"
    words = step_command(plan.script, len(site.ranks), plan.folder, "tfdist", environment)
    yield f"  {shlex.join(words)}"
