"""Write, read and check TF_CONFIG, through which TensorFlow's processes find each other, and roles.

Most mistakes in it make TensorFlow wait forever. Here, each mistake raises an error that names the
entry. This is pure Python, and host names are not resolved.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
from collections.abc import Mapping, Sequence, Sized
from dataclasses import dataclass
from typing import Any, SupportsIndex

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.arguments import check_whole_number, counted
from pybackend.core.words import either, element, show

ROLES = ("chief", "worker", "ps", "evaluator")
_SINGLE = ("chief", "evaluator")
Addresses = Mapping[int, str]

_INDEX = re.compile(r"[0-9]{1,9}")
_LABEL = r"[A-Za-z0-9_](?:[A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_FAULTS = (  # in this order: each assumes that the faults above it were not found
    (r"\s", "contains white space, which makes TensorFlow hang: remove it", ""),
    (r"://", "begins with a protocol: leave it out, as in {}", "10.0.0.1:2222"),
    (r"^(:[^:]*)?$", "has no host: expected {}", "host:port"),
    (r"^(?!\[).*:.*:", "has several colons: write an IPv6 address as in {}", "[fd00::1]:2222"),
    (r"^([^:\[]*|\[.*\]):?$", "has no port: expected {}", "host:port"),
)


@dataclass(frozen=True)
class ClusterSpec:
    """A validated TF_CONFIG.

    Attributes
    ----------
    cluster
        Maps role to index to ``host:port``.
    role, index
        Role and index of this process.
    """

    cluster: Mapping[str, Addresses]
    role: str
    index: int

    @property
    def address(self) -> str:
        """Address of this process, as ``host:port``."""
        return self.cluster[self.role][self.index]

    @property
    def is_chief(self) -> bool:
        """True if this process saves checkpoints: the chief or, if there is none, worker 0."""
        return self.rank == 0

    @property
    def world_size(self) -> int:
        """Number of chief and worker processes, including those that a mapping skips."""
        return sum(max(self.cluster.get(role, {}), default=-1) + 1 for role in ("chief", "worker"))

    @property
    def rank(self) -> int | None:
        """Rank of this process among chief and workers, the chief first; None for other roles."""
        if self.role not in ("chief", "worker"):
            return None
        return self.index + (self.role == "worker" and "chief" in self.cluster)

    def to_json(self) -> str:
        """Return the TF_CONFIG text. Roles with all indices are lists, others are mappings."""
        cluster = {k: [*v.values()] if _is_dense(v) else dict(v) for k, v in self.cluster.items()}
        return json.dumps({"cluster": cluster, "task": {"type": self.role, "index": self.index}})


def make_tf_config(
    workers: Sequence[str] | Mapping[int, str],
    index: int | None = None,
    *,
    role: str = "worker",
    chief: str | Sequence[str] | None = None,
    ps: Sequence[str] | Mapping[int, str] | None = None,
    evaluator: str | Sequence[str] | None = None,
) -> str:
    """Return the TF_CONFIG text of one process.

    Parameters
    ----------
    workers
        ``host:port`` of every worker, in the same order on all machines; or a mapping from index to
        address, if this process knows only some of them.
    index
        Index of this process within its role. Optional for the chief and the evaluator.
    role
        ``"worker"``, ``"chief"``, ``"ps"`` or ``"evaluator"``.
    chief, ps, evaluator
        Addresses of these roles, if any.

    Raises
    ------
    ClusterError
        An entry is invalid. The message names it and the fix.

    Examples
    --------
    >>> make_tf_config(["10.0.0.1:2222", "10.0.0.2:2222"], 1)  # doctest: +ELLIPSIS
    '{"cluster": {"worker": [...]}, "task": {"type": "worker", "index": 1}}'
    """
    chiefs, evaluators = ([x] if isinstance(x, str) else x for x in (chief, evaluator))
    given = {"chief": chiefs, "worker": workers, "ps": ps, "evaluator": evaluators}
    given = {name: _to_plain(tasks) for name, tasks in given.items()}
    index, role = _to_plain(index), _to_plain(role)
    absent = [k for k, v in given.items() if v is None or (isinstance(v, Sized) and not len(v))]
    cluster = {name: tasks for name, tasks in given.items() if name not in absent}
    index = 0 if index is None and role in ("chief", "evaluator") else index
    return _check_cluster(cluster, {"type": role, "index": index}).to_json()


def read_tf_config(text: str | None = None) -> ClusterSpec:
    """Read and check a TF_CONFIG text. None reads the environment variable.

    Raises
    ------
    ClusterError
        An entry is invalid. The message names it and the fix.
    """
    text = os.environ.get("TF_CONFIG") if text is None else text
    try:
        return _read(text)
    except RecursionError as error:
        raise ClusterError("TF_CONFIG is nested too deeply: use make_tf_config()") from error


def names_cluster(text: str) -> bool:
    """Return whether a TF_CONFIG may describe several processes: True if it cannot be read."""
    try:
        config = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return True
    return not isinstance(config, dict) or bool(config.get("cluster"))


def _read(text: str | None) -> ClusterSpec:
    warning = "TensorFlow would silently train in one process. Use the output of make_tf_config()"
    if not text:
        raise ClusterError(f"TF_CONFIG is not set, or empty: {warning}")
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ClusterError(f"TF_CONFIG is not JSON ({error}): use make_tf_config()") from error
    cluster, task = map(config.get, ("cluster", "task")) if isinstance(config, dict) else (0, 0)
    if not cluster or not isinstance(cluster, dict):
        raise ClusterError(f"TF_CONFIG has no `cluster` that maps roles to addresses: {warning}")
    if not isinstance(task, dict) or "type" not in task:
        raise ClusterError(
            f"TF_CONFIG has no `task`: expected {show({'type': 'worker', 'index': 0})}"
        )
    if isinstance(task.get("index"), str) and _INDEX.fullmatch(task["index"]):
        task = {**task, "index": int(task["index"])}  # TensorFlow also accepts text
    return _check_cluster(cluster, task)


def parse_address(address: Any, entry: str = "address") -> tuple[str, int]:
    """Return host (lower case; short IPv6 without brackets) and port; ``entry`` is for errors.

    Raises `ClusterError` if TensorFlow could not use the address, or would wait forever.
    """
    subject = f"{entry} = {show(address)}"
    if not isinstance(address, str):
        raise ClusterError(f"{subject} is not text: expected {show('host:port')}")
    for pattern, fault, example in _FAULTS:
        if re.search(pattern, address):
            raise ClusterError(f"{subject} {fault.format(show(example))}")
    host, _, port = address.rpartition(":")
    try:
        host = _normalize(host)
    except ValueError as error:
        raise ClusterError(f"{subject}: {show(host)} is not a host name or IP address") from error
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ClusterError(f"{subject} has port {show(port)}: choose a free one from 1 to 65535")
    return host, int(port)


def _normalize(host: str) -> str:
    if bracketed := re.fullmatch(r"\[(.+)\]", host):
        return str(ipaddress.IPv6Address(bracketed[1]))
    if re.fullmatch(r"[0-9.]+", host):  # never looked up as a name
        return str(ipaddress.IPv4Address(host))
    if not _NAME.fullmatch(host):
        raise ValueError(host)
    return host.lower()


def _check_cluster(cluster: Mapping[str, Any], task: Mapping[str, Any]) -> ClusterSpec:
    for role in [*cluster, task.get("type")]:
        if role not in ROLES:
            fix = _advise(role) or ": rename it"
            raise ClusterError(f"role {show(role)} is not one of {', '.join(ROLES)}{fix}")
    seen: dict[tuple[str, int], str] = {}
    tasks = {role: _read_tasks(role, cluster[role], seen) for role in ROLES if role in cluster}
    for role in _SINGLE:
        if list(tasks.get(role, {0: ""})) != [0]:
            raise ClusterError(
                f"{role} = {show(cluster[role])}: only index 0 may exist; drop the others"
            )
    if "worker" not in tasks and "chief" not in tasks:
        raise ClusterError("the cluster has neither workers nor a chief: list the workers")
    return ClusterSpec(tasks, task["type"], _read_index(tasks, task))


def _advise(role: Any) -> str:
    return f": call it {show('chief')}, as TensorFlow 2 does" if role == "master" else ""


def _read_tasks(role: str, value: Any, seen: dict[tuple[str, int], str]) -> dict[int, str]:
    if isinstance(value, str):
        raise ClusterError(
            f"{role} = {show(value)} is not a list: write "
            f"{show([value])}{either(', or in R list()', '')}"
        )
    if not isinstance(value, (Mapping, Sequence)) or not value:
        raise ClusterError(
            f"{role} = {show(value)}: expected a list of {show('host:port')}, or no {role}"
        )
    items = value.items() if isinstance(value, Mapping) else enumerate(value)
    tasks: dict[int, str] = {}
    for key, address in items:
        entry = element(role, key)
        if not _INDEX.fullmatch(str(key)) or int(key) in tasks:
            raise ClusterError(f"{entry}: expected a whole number from 0, and only once")
        tasks[int(key)] = address
        if (other := seen.setdefault(parse_address(address, entry), entry)) != entry:
            subject = f"{entry} = {show(address)} is the address of {other} too"
            raise ClusterError(f"{subject}: give each its own port, or one of them will hang")
    return dict(sorted(tasks.items()))


def _read_index(cluster: Mapping[str, Addresses], task: Mapping[str, Any]) -> int:
    role, index = task["type"], task.get("index")
    if role not in cluster:
        raise ClusterError(f"this process is {show(role)}, but the cluster lists no {role}: add it")
    tasks = cluster[role]
    if isinstance(index, bool) or not isinstance(index, SupportsIndex) or int(index) not in tasks:
        subject = "is missing" if index is None else f"is {show(index)}"
        known = ", ".join(map(str, tasks))
        raise ClusterError(f"`index` {subject}: expected the number of a {role}, one of {known}")
    return int(index)


def _to_plain(value: Any) -> Any:
    """Convert numpy arrays and numbers to Python values: R's arrays arrive as numpy arrays."""
    return value.tolist() if hasattr(value, "tolist") else value


def _is_dense(tasks: Addresses) -> bool:
    return list(tasks) == list(range(len(tasks)))


Roles = tuple[tuple[str, int], ...]


def check_roles(value: Any) -> Roles:
    """Check the argument ``roles``; return pairs of a role and its count, in the order of ranks.

    None: no pairs.
    """
    if value is None:
        return ()
    if not isinstance(value, Mapping):
        raise InputError(
            "`roles` must map roles to numbers of workers, e.g. "
            f"{show({'chief': 1, 'worker': 2, 'ps': 1})}, not {show(value)}"
        )
    if unknown := [role for role in value if role not in ROLES]:
        raise InputError(
            f"`roles` has {show(unknown[0])}; expected {', '.join(ROLES)}{_advise(unknown[0])}"
        )
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


def find_role(roles: Roles, rank: int) -> tuple[str, int]:
    """Return the role of a rank and its index within the role; without roles, all are workers."""
    index = rank
    for role, count in roles:
        if index < count:
            return role, index
        index -= count
    return "worker", index


def ranks_of(roles: Roles, role: str) -> list[int]:
    count = sum(number for _, number in roles)
    return [rank for rank in range(count) if find_role(roles, rank)[0] == role]


def config_of(roles: Roles, addresses: Sequence[str], rank: int) -> str:
    """Return the TF_CONFIG text of a rank; the addresses are ``host:port`` by rank."""
    if not roles:
        return make_tf_config(addresses, rank)
    role, index = find_role(roles, rank)
    by_role = {name: [addresses[one] for one in ranks_of(roles, name)] for name in ROLES}
    if role != "evaluator":  # TensorFlow expects that it does not belong to the others' cluster
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
    return {rank for rank in range(workers) if find_role(roles, rank)[0] == leading}


def ranks_that_follow(roles: Roles, workers: int) -> set[int]:
    """Return the ranks that are stopped once the leading ones have returned."""
    # With a chief and parameter servers, the workers only serve the chief.
    serves = dict(roles).keys() >= {"chief", "ps"}
    following = ("ps", "evaluator", "worker") if serves else ("ps", "evaluator")
    return {rank for rank in range(workers) if find_role(roles, rank)[0] in following}
