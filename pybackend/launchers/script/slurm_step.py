"""One rank of `tfdist run` in an allocation: its place and cores, from Slurm's variables."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import NoReturn

from pybackend.launchers.slurm.nodes import count_cores, count_local, hosts_by_rank, step_port
from pybackend.tf_config import make_tf_config


def main(*command: str) -> NoReturn:
    """Exec a command with the variables of its worker group, so that it gets Slurm's signals."""
    os.environ.update(group_variables(os.environ))
    sys.stdout.flush()
    os.execvp(command[0], command)  # noqa: S606 (the purpose)


def group_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables from which a task's script finds its worker group.

    GPUs are not included, because Slurm restricts each task to its own GPUs.
    """
    rank = int(environment["SLURM_PROCID"])
    hosts = hosts_by_rank(environment)
    port = step_port(environment)
    # Ranks of one host are consecutive, and have different ports.
    addresses = [f"{host}:{port + r - hosts.index(host)}" for r, host in enumerate(hosts)]
    cores = str(count_cores(environment))
    # A job that Slurm requeued counts as a restart, too.
    restarts = (environment.get(name) or 0 for name in ("TFDIST_RESTART", "SLURM_RESTART_COUNT"))
    return {
        "TF_CONFIG": make_tf_config(addresses, rank),
        "RANK": str(rank),
        "WORLD_SIZE": str(len(hosts)),
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": str(count_local(environment)),
        "TFDIST_RESTART": str(sum(map(int, restarts))),
        "TF_NUM_INTRAOP_THREADS": environment.get("TF_NUM_INTRAOP_THREADS", cores),
        "OMP_NUM_THREADS": environment.get("OMP_NUM_THREADS", cores),
    }
