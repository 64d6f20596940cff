"""How many tasks a job has, and whether its nodes can take so many."""

from __future__ import annotations

from typing import Any

from pybackend.errors import InputError

PER_NODE = "ntasks-per-node"


def as_count(value: Any) -> int | None:
    """A number of nodes or tasks; None if Slurm may choose it, as among ``2-4`` nodes."""
    text = str(value)
    return int(text) if text.isdecimal() and int(text) else None


def count_tasks(nodes: int | None, per_node: int | None) -> int | None:
    """Tasks of a job of which only the nodes are known: one per node, unless it says more."""
    return None if nodes is None else nodes * (per_node or 1)


def check_tasks(workers: int, nodes: int | None, per_node: int | None) -> None:
    """Whether workers can be spread over nodes like this.

    Parameters
    ----------
    nodes, per_node
        Nodes of the job, and workers on each; None: Slurm decides.

    Raises
    ------
    InputError
        A node would have no worker, or the three numbers do not agree.
    """
    if nodes is None:
        return
    if nodes > workers:
        raise InputError(
            f"{nodes} nodes need at least {nodes} workers, but the number of workers is {workers}: "
            "use more workers, or fewer nodes"
        )
    if per_node is not None and nodes * per_node != workers:
        raise InputError(
            f"{nodes} nodes with {PER_NODE}={per_node} have {nodes * per_node} workers, but the "
            f"number of workers is {workers}: leave out {PER_NODE}, or make the numbers agree"
        )
