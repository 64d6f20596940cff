"""Rank and address of a process that Slurm's ``srun`` started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pybackend.errors import ClusterError
from pybackend.launchers.joined.place import Place, pick_port
from pybackend.launchers.slurm.nodes import expand_counts, expand_nodes

# Steps of a job, and consecutive jobs of a user, may share hosts, so their ports are far apart.
_STRIDE = 97


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Return the place of a process among the tasks of its job step.

    Parameters
    ----------
    environment
        Variables of the process.

    Returns
    -------
    Place or None
        None outside ``srun``, as in a batch script, and in a step of one task, as in
        ``srun --pty bash``.

    Raises
    ------
    ClusterError
        The host of the first task cannot be found from the step's variables.
    """
    if int(environment.get("SLURM_STEP_NUM_TASKS") or 1) < 2 or "SLURM_PROCID" not in environment:
        return None
    return Place(
        rank=int(environment["SLURM_PROCID"]),
        size=int(environment["SLURM_STEP_NUM_TASKS"]),
        meeting=f"{_first_host(environment)}:{step_port(environment)}",
        own=None,
        source="srun",
        peers=_find_peers(environment),
        local_rank=int(environment.get("SLURM_LOCALID") or 0),
        local_size=_count_local(environment),
    )


def step_port(environment: Mapping[str, str]) -> int:
    """Return the port of a step, the same in all its tasks, and rarely that of another step."""
    # Tasks of a job array are jobs, each with its own SLURM_JOB_ID.
    job, step = (int(environment.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return pick_port((job * 7 + step) * _STRIDE)


def hosts_by_rank(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the node of each task of a step with block distribution."""
    nodes, counts = _tasks_by_node(environment)
    return tuple(node for node, count in zip(nodes, counts, strict=True) for _ in range(count))


def _find_peers(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the node of each task; empty if Slurm's variables do not determine it."""
    # Other parts concern the sockets and cores of a node, or the number of tasks per node.
    words = re.split("[:,]", environment.get("SLURM_DISTRIBUTION") or "block")
    nodes, counts = _tasks_by_node(environment)
    if words[0] not in ("block", "cyclic") or len(nodes) != len(counts):
        return ()
    peers = hosts_by_rank(environment)
    if words[0] == "cyclic":
        rounds = range(max(counts))
        peers = tuple(n for r in rounds for n, c in zip(nodes, counts, strict=True) if r < c)
    rank, own = int(environment["SLURM_PROCID"]), int(environment.get("SLURM_NODEID") or 0)
    is_certain = len(peers) == int(environment["SLURM_STEP_NUM_TASKS"])
    return peers if is_certain and peers[rank : rank + 1] == (nodes[own],) else ()


def _tasks_by_node(environment: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """Return the nodes of the step, in Slurm's order, and the number of tasks on each."""
    nodes = expand_nodes(environment["SLURM_STEP_NODELIST"])
    return nodes, expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))


def _count_local(environment: Mapping[str, str]) -> int:
    """Return the number of the step's tasks on this node."""
    _, counts = _tasks_by_node(environment)
    return counts[int(environment.get("SLURM_NODEID") or 0)]


def _first_host(environment: Mapping[str, str]) -> str:
    """Return the host of rank 0."""
    if environment.get("SLURM_DISTRIBUTION") != "arbitrary":
        # Nodes are in Slurm's order, and all other distributions begin with the first node.
        return expand_nodes(environment["SLURM_STEP_NODELIST"])[0]
    file = environment.get("SLURM_HOSTFILE")
    try:
        return re.split(r"[\s,*]", Path(file or "").read_text().strip())[0]
    except OSError:
        raise ClusterError(
            "srun --distribution=arbitrary placed the tasks, but its list of hosts, "
            f"SLURM_HOSTFILE={file}, cannot be read here: put it on a file system that all nodes "
            "share, or use --distribution=block or cyclic"
        ) from None
