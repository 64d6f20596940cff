"""A process's place in a gang that Slurm's ``srun`` has started."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from pybackend.errors import ClusterError
from pybackend.launchers.joined.place import Place, pick_port
from pybackend.launchers.slurm.nodes import expand_counts, expand_nodes

# Steps of one job, and jobs of one user in a row, are on the same hosts: they get distant ports.
_STRIDE = 97


def find_place(environment: Mapping[str, str]) -> Place | None:
    """The place of a process among the tasks of its job step.

    Parameters
    ----------
    environment
        The process's variables.

    Returns
    -------
    Place or None
        None outside of ``srun``, as in a batch script, and in a step of one task, as in
        ``srun --pty bash``.

    Raises
    ------
    ClusterError
        The step's variables do not say on which host its first task is.
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
    """A port that all tasks of a step know, and that other steps hardly have."""
    # An array's tasks are jobs, with numbers of their own in SLURM_JOB_ID.
    job, step = (int(environment.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return pick_port((job * 7 + step) * _STRIDE)


def hosts_by_rank(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The node of each task of a step whose tasks are distributed by blocks."""
    nodes, counts = _tasks_by_node(environment)
    return tuple(node for node, count in zip(nodes, counts, strict=True) for _ in range(count))


def _find_peers(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The node of each task; empty where Slurm's variables leave it open."""
    # What follows is about the sockets and cores of a node, or about how many tasks each gets.
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
    """Nodes of the step, in Slurm's order, and how many of its tasks each has."""
    nodes = expand_nodes(environment["SLURM_STEP_NODELIST"])
    return nodes, expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))


def _count_local(environment: Mapping[str, str]) -> int:
    """Tasks of the step on this node."""
    _, counts = _tasks_by_node(environment)
    return counts[int(environment.get("SLURM_NODEID") or 0)]


def _first_host(environment: Mapping[str, str]) -> str:
    """The host of rank 0."""
    if environment.get("SLURM_DISTRIBUTION") != "arbitrary":
        # Nodes are in Slurm's order, and all other distributions begin with the first one.
        return expand_nodes(environment["SLURM_STEP_NODELIST"])[0]
    file = environment.get("SLURM_HOSTFILE")
    try:
        return re.split(r"[\s,*]", Path(file or "").read_text().strip())[0]
    except OSError:
        raise ClusterError(
            "srun --distribution=arbitrary has placed the tasks, and the file that says where, "
            f"SLURM_HOSTFILE={file}, cannot be read here: put it on a file system that all nodes "
            "share, or use --distribution=block or cyclic"
        ) from None
