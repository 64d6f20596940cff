"""What to change if Slurm does not take a job, lets it wait forever, or cannot start its tasks."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LIST = "; `sinfo -o '%P %l %D %c %m %G'` lists what each partition has"
# What the starter of a task says of a program that is not there, and Python of a package.
_NO_PYTHON = re.compile(r"error: execve\(\): |^ModuleNotFoundError: No module named")
# Words of sbatch, and reasons of pending jobs; the first that fits says most.
_ADVICE = (
    (
        r"gres|GRES|TRES",
        "Change `gpus` of slurm(), or `gres` in its `options`, or choose another `partition`"
        + _LIST,
    ),
    (
        r"PartitionTimeLimit|[Tt]ime limit|Invalid --time",
        "Change `time` of slurm(): the limits of the partition are in `sinfo -o '%P %l'`",
    ),
    (
        r"AccountNotAllowed|InvalidAccount|[Aa]ccount/partition",
        "Name an account of yours as `account` in `options` of slurm(), or choose another "
        "`partition`; `sacctmgr show associations user=$USER` lists your accounts",
    ),
    (
        r"InvalidQOS|QOSNotAllowed|Invalid qos",
        "Change `qos` in `options` of slurm(); `sacctmgr show qos` lists those that there are",
    ),
    (
        r"accounting/QOS policy",
        "Ask for less: fewer workers, or less `time` in slurm()",
    ),
    (
        r"invalid partition|Invalid partition|not permitted to use this partition",
        "Choose another `partition` of slurm(); `sinfo` lists them",
    ),
    (
        r"PartitionNodeLimit|Node count specification",
        "Change `nodes` of slurm(), or choose another `partition`" + _LIST,
    ),
    (
        r"PartitionConfig|BadConstraints|[Nn]ode configuration|More processors|Memory spec"
        r"|more tasks than",
        "No node of the partition has so much. Ask for less, by `nodes`, `cpus` or `gpus` of "
        "slurm() or by `resources`, or choose another `partition`" + _LIST,
    ),
    (
        r"Invalid feature",
        "Change `constraint` in `options` of slurm(); `sinfo -o '%P %f'` lists the features",
    ),
    (
        r"DependencyNeverSatisfied|[Dd]ependency",
        "Change `dependency` in `options` of slurm()",
    ),
    (
        r"unrecognized option|ambiguous|Invalid --|Invalid time specification|Invalid .* spec",
        "Correct that option in `options` of slurm(); `sbatch --help` lists all options",
    ),
)


def explain_refusal(said: str) -> str:
    """A sentence on which argument of `slurm` to change; empty if these words are unknown."""
    return next((advice for pattern, advice in _ADVICE if re.search(pattern, said)), "")


def explain_log(lines: Iterable[str]) -> str:
    """A sentence on why a task has ended at its very start; empty if its log does not show it."""
    if not any(map(_NO_PYTHON.search, lines)):
        return ""
    return (
        "`python` of slurm() must be the path of a Python that all nodes have, with the packages "
        "that this one has; without it, the path is this one's"
    )
