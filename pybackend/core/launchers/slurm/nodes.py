"""Nodes, tasks and cores of a job step, from Slurm's variables, and its short forms of names.

Slurm's own command for this, ``scontrol show hostnames``, is missing in most containers.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path

from pybackend.core.errors import ClusterError
from pybackend.core.net.rendezvous import pick_port

# Steps of a job, and consecutive jobs of a user, may share hosts, so their ports are far apart.
_STRIDE = 97


def step_port(environment: Mapping[str, str]) -> int:
    """Return the port of a step: the same in all its tasks, and rarely that of another step."""
    # Tasks of a job array are jobs, each with its own SLURM_JOB_ID.
    job, step = (int(environment.get(name) or 0) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return pick_port((job * 7 + step) * _STRIDE)


def hosts_by_rank(environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the node of each task of a step with block distribution."""
    nodes, counts = tasks_by_node(environment)
    return tuple(node for node, count in zip(nodes, counts, strict=True) for _ in range(count))


def tasks_by_node(environment: Mapping[str, str]) -> tuple[list[str], list[int]]:
    """Return the nodes of the step, in Slurm's order, and the number of tasks on each."""
    nodes = expand_nodes(environment["SLURM_STEP_NODELIST"])
    return nodes, expand_counts(environment.get("SLURM_STEP_TASKS_PER_NODE", "1"))


def count_local(environment: Mapping[str, str]) -> int:
    """Return the number of the step's tasks on this node."""
    _, counts = tasks_by_node(environment)
    return counts[int(environment.get("SLURM_NODEID") or 0)]


def first_host(environment: Mapping[str, str]) -> str:
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


def count_cores(environment: Mapping[str, str]) -> int:
    """Return this task's number of cores: as requested, or its share of the job's cores here."""
    if "SLURM_CPUS_PER_TASK" in environment:
        return int(environment["SLURM_CPUS_PER_TASK"])
    own = count_local(environment)
    return max(1, int(environment.get("SLURM_CPUS_ON_NODE") or 1) // own)


def expand_nodes(text: str) -> list[str]:
    """Return node names in Slurm's order: ``n2, n10, n11`` for ``n[2,10-11]``."""
    # A comma within brackets does not separate nodes.
    nodes = re.findall(r"(?:[^,\[\s]|\[[^\]]*\])+", text)
    return [name for node in nodes for name in _expand(node)]


def expand_counts(text: str) -> list[int]:
    """Return the number of tasks on each node: ``2, 1, 1`` for ``2,1(x2)``."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _expand(node: str) -> list[str]:
    parts = re.split(r"\[([^\]]*)\]", node)
    choices = [_numbers(part) if place % 2 else [part] for place, part in enumerate(parts)]
    return ["".join(chosen) for chosen in itertools.product(*choices)]


def _numbers(ranges: str) -> list[str]:
    """Return ``007, 008, 012`` for ``007-008,012``."""
    found: list[str] = []
    for first, last in re.findall(r"(\w+)(?:-(\w+))?", ranges):
        if not last:
            found.append(first)
            continue
        found += [f"{number:0{len(first)}d}" for number in range(int(first), int(last) + 1)]
    return found
