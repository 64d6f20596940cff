"""The roles that TensorFlow gives the processes of a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import check_whole_number, counted
from pybackend.core.tf_config import ROLES, make_tf_config
from pybackend.core.words import show

Roles = tuple[tuple[str, int], ...]
_SINGLE = ("chief", "evaluator")


def check_roles(value: Any) -> Roles:
    """Check the argument ``roles``; return pairs of a role and its count, in the order of ranks.

    If ``roles`` is None, there are no pairs.

    Raises
    ------
    InputError
        Names the role and what is expected.
    """
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise InputError(
            "`roles` must map roles to numbers of workers, e.g. "
            f"{show({'chief': 1, 'worker': 2, 'ps': 1})}, not {show(value)}"
        )
    if unknown := [role for role in value if role not in ROLES]:
        fix = f": call it {show('chief')}, as TensorFlow 2 does" if unknown[0] == "master" else ""
        raise InputError(f"`roles` has {show(unknown[0])}; expected {', '.join(ROLES)}{fix}")
    counts = {
        role: check_whole_number(f"roles[{show(role)}]", value[role], least=0)
        for role in ROLES
        if role in value
    }
    for role in _SINGLE:
        if counts.get(role, 0) > 1:
            raise InputError(f"`roles[{show(role)}]` must be 0 or 1, not {counts[role]}")
    if not counts.get("chief") and not counts.get("worker"):
        raise InputError(f"`roles` must have a chief or a worker, not just {show(value)}")
    return tuple((role, count) for role, count in counts.items() if count)


def place_of(roles: Roles, rank: int) -> tuple[str, int]:
    """Return the role of a rank and its index within the role; without roles, all are workers."""
    index = rank
    for role, count in roles:
        if index < count:
            return role, index
        index -= count
    return "worker", index


def ranks_of(roles: Roles, role: str) -> list[int]:
    """Return the ranks of a role, in the order of their indices."""
    count = sum(number for _, number in roles)
    return [rank for rank in range(count) if place_of(roles, rank)[0] == role]


def config_of(roles: Roles, addresses: Sequence[str], rank: int) -> str:
    """Return the TF_CONFIG text of a rank.

    As TensorFlow expects, the evaluator does not belong to the others' cluster.

    Parameters
    ----------
    addresses
        ``host:port`` by rank.
    """
    if not roles:
        return make_tf_config(addresses, rank)
    role, index = place_of(roles, rank)
    by_role: dict[str, list[str]] = {name: [] for name in ROLES}
    for other, address in enumerate(addresses):
        by_role[place_of(roles, other)[0]].append(address)
    if role != "evaluator":
        del by_role["evaluator"]
    return make_tf_config(by_role.pop("worker"), index, role=role, **by_role)


def describe_processes(roles: Roles, workers: int) -> str:
    """Return the processes of a training, e.g. ``2 workers, a chief and 1 parameter server``."""
    if not roles:
        return counted(workers, "worker")
    counts = dict(roles)
    servers = counted(counts["ps"], "parameter server")
    return f"{counted(counts['worker'], 'worker')}, a chief and {servers}"


def ranks_that_lead(roles: Roles, workers: int) -> set[int]:
    """Return the ranks whose return ends the call: the chief or, if there is none, all workers."""
    leading = "chief" if dict(roles).get("chief") else "worker"
    return {rank for rank in range(workers) if place_of(roles, rank)[0] == leading}


def ranks_that_follow(roles: Roles, workers: int) -> set[int]:
    """Return the ranks that are stopped once the leading ones have returned.

    These are parameter servers and evaluators. If there are a chief and parameter servers, the
    workers are included, because they then only serve the chief.
    """
    counts = dict(roles)
    following = {"ps", "evaluator"}
    if counts.get("chief") and counts.get("ps"):
        following.add("worker")
    return {rank for rank in range(workers) if place_of(roles, rank)[0] in following}
