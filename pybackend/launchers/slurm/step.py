"""What Slurm tells a task of a step: its rank, its host and the others', its cores."""

from __future__ import annotations

from collections.abc import Mapping

from pybackend.launchers.joined.slurm_place import hosts_by_rank, step_port
from pybackend.launchers.slurm.nodes import expand_counts
from pybackend.tf_config import make_tf_config


def count_cores(environment: Mapping[str, str]) -> int:
    """Cores of this task: those that it asked for, or its share of the job's on this node."""
    if "SLURM_CPUS_PER_TASK" in environment:
        return int(environment["SLURM_CPUS_PER_TASK"])
    own = _count_local(environment)
    return max(1, int(environment.get("SLURM_CPUS_ON_NODE") or 1) // own)


def gang_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables by which a script finds its gang, for a task of such a step.

    GPUs are not among them: Slurm shows a task its own.
    """
    rank = int(environment["SLURM_PROCID"])
    hosts = hosts_by_rank(environment)
    port = step_port(environment)
    # Those of one host follow each other, and have ports of their own.
    addresses = [f"{host}:{port + r - hosts.index(host)}" for r, host in enumerate(hosts)]
    cores = str(count_cores(environment))
    # A job that Slurm has started again is a restart, too.
    restarts = (environment.get(name) or 0 for name in ("TFDIST_RESTART", "SLURM_RESTART_COUNT"))
    return {
        "TF_CONFIG": make_tf_config(addresses, rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(_count_local(environment)),
        "TFDIST_RESTART": str(sum(map(int, restarts))),
        "TF_NUM_INTRAOP_THREADS": environment.get("TF_NUM_INTRAOP_THREADS", cores),
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", cores),
    }


def _count_local(environment: Mapping[str, str]) -> int:
    """Tasks of the step on this node."""
    counts = expand_counts(environment["SLURM_STEP_TASKS_PER_NODE"])
    return counts[int(environment.get("SLURM_NODEID") or 0)]
