"""Advice for jobs that Slurm rejects or never starts, and for tasks that it cannot start."""

from __future__ import annotations

import re
from collections.abc import Iterable

_LIST = "; `sinfo -o '%P %l %D %c %m %G'` lists what each partition has"
# Messages of Slurm about a missing program, and of Python about a missing package.
_NO_PYTHON = re.compile(r"error: execve\(\): |^ModuleNotFoundError: No module named")
# Messages of sbatch and reasons of pending jobs; the first match is the most specific.
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
        "Set `account` in `options` of slurm() to one of your accounts, or choose another "
        "`partition`; `sacctmgr show associations user=$USER` lists your accounts",
    ),
    (
        r"InvalidQOS|QOSNotAllowed|Invalid qos",
        "Change `qos` in `options` of slurm(); `sacctmgr show qos` lists all",
    ),
    (
        r"accounting/QOS policy",
        "Request less: fewer workers, or less `time` in slurm()",
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
        "No node of the partition is large enough. Request less, by `nodes`, `cpus` or `gpus` "
        "of slurm() or by `resources`, or choose another `partition`" + _LIST,
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
    """Return advice on which argument of `slurm` to change; empty if the message is unknown."""
    return next((advice for pattern, advice in _ADVICE if re.search(pattern, said)), "")


def explain_log(lines: Iterable[str]) -> str:
    """Return why a task ended at its start; empty if its log does not show the reason."""
    if not any(map(_NO_PYTHON.search, lines)):
        return ""
    return (
        "`python` of slurm() must be the path of a Python that all nodes have, with the same "
        "packages as this one; by default, it is the path of this one"
    )
