"""TF_CONFIG, by which TensorFlow's processes find each other: made, read and checked.

TensorFlow answers most mistakes in it with a wait that never ends. Here each is an error that
names the entry. Pure Python; no name is looked up.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pybackend.errors import ClusterError

ROLES = ("chief", "worker", "ps", "evaluator")
Addresses = Mapping[int, str]

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?\.?")
_IPV6 = re.compile(r"\[[0-9A-Fa-f:.]+(%[A-Za-z0-9]+)?\]")


@dataclass(frozen=True)
class ClusterSpec:
    """A checked TF_CONFIG.

    Attributes
    ----------
    cluster
        Role to index to ``host:port``.
    role, index
        Of this process.
    """

    cluster: Mapping[str, Addresses]
    role: str
    index: int

    @property
    def address(self) -> str:
        """``host:port`` of this process."""
        return self.cluster[self.role][self.index]

    @property
    def is_chief(self) -> bool:
        """Whether this process saves checkpoints: the chief, else worker 0."""
        if "chief" in self.cluster:
            return self.role == "chief"
        return self.role == "worker" and self.index == min(self.cluster["worker"])

    @property
    def world_size(self) -> int:
        """Processes that train: the chief and the workers."""
        return sum(len(self.cluster.get(role, {})) for role in ("chief", "worker"))

    @property
    def rank(self) -> int | None:
        """Number of this process among those that train, the chief first; else None."""
        if self.role not in ("chief", "worker"):
            return None
        if self.role == "chief":
            return 0
        before = sorted(self.cluster["worker"]).index(self.index)
        return before + len(self.cluster.get("chief", {}))

    def to_json(self) -> str:
        """The TF_CONFIG text; lists where all indices are there, else maps."""
        return json.dumps(
            {
                "cluster": {role: _listed(tasks) for role, tasks in self.cluster.items()},
                "task": {"type": self.role, "index": self.index},
            }
        )


def make_tf_config(
    workers: Sequence[str] | Mapping[int, str],
    index: int | None = None,
    *,
    role: str = "worker",
    chief: str | Sequence[str] | None = None,
    ps: Sequence[str] | Mapping[int, str] | None = None,
    evaluator: str | Sequence[str] | None = None,
) -> str:
    """The TF_CONFIG text of one process.

    Parameters
    ----------
    workers
        ``host:port`` of every worker in the same order on all machines; a mapping from index to
        address where this process knows only some.
    index
        Of this process among those of its role; may be left out for the chief and evaluator.
    role
        ``"worker"``, ``"chief"``, ``"ps"`` or ``"evaluator"``.
    chief, ps, evaluator
        Their addresses, where there are any.

    Raises
    ------
    ClusterError
        Names the entry that is wrong, and the mend.

    Examples
    --------
    >>> make_tf_config(["10.0.0.1:2222", "10.0.0.2:2222"], 1)  # doctest: +ELLIPSIS
    '{"cluster": {"worker": [...]}, "task": {"type": "worker", "index": 1}}'
    """
    given = {
        "chief": [chief] if isinstance(chief, str) else chief,
        "worker": workers,
        "ps": ps,
        "evaluator": [evaluator] if isinstance(evaluator, str) else evaluator,
    }
    cluster = {name: tasks for name, tasks in given.items() if tasks is not None and len(tasks)}
    if index is None and role in ("chief", "evaluator"):
        index = 0
    return _checked(cluster, {"type": role, "index": index}).to_json()


def read_tf_config(text: str | None = None) -> ClusterSpec:
    """Read and check a TF_CONFIG text; None reads the environment variable.

    Raises
    ------
    ClusterError
        Names the entry that is wrong, and the mend.
    """
    if text is None:
        text = os.environ.get("TF_CONFIG")
        if not text:
            raise ClusterError(
                "TF_CONFIG is not set: TensorFlow would silently train on one process. "
                "Set it to the text that make_tf_config() returns"
            )
    try:
        config = json.loads(text)
    except ValueError as error:
        raise ClusterError(f"TF_CONFIG is no JSON ({error}): use make_tf_config()") from error
    if not isinstance(config, dict) or not config.get("cluster"):
        raise ClusterError(
            "TF_CONFIG has no `cluster`: TensorFlow would silently train on one process. "
            "Expected {'cluster': {'worker': [...]}, 'task': {'type': ..., 'index': ...}}"
        )
    if not isinstance(config["cluster"], dict):
        raise ClusterError("`cluster` of TF_CONFIG must map roles to lists of addresses")
    task = config.get("task")
    if not isinstance(task, dict) or "type" not in task:
        raise ClusterError("TF_CONFIG has no `task`: expected {'type': 'worker', 'index': 0}")
    if isinstance(task.get("index"), str) and re.fullmatch(r"\d+", task["index"]):
        task = {**task, "index": int(task["index"])}  # TensorFlow reads text as a number, too
    return _checked(config["cluster"], task)


def check_same_cluster(texts: Sequence[str]) -> None:
    """Check the TF_CONFIG texts of all processes against each other.

    Raises
    ------
    ClusterError
        Where two describe different clusters, or two processes claim the same task: TensorFlow
        would wait for ever.
    """
    specs = [read_tf_config(text) for text in texts]
    claimed: dict[tuple[str, int], int] = {}
    for place, spec in enumerate(specs):
        if spec.cluster != specs[0].cluster:
            raise ClusterError(
                f"TF_CONFIG number {place} lists {_shown(spec.cluster)}, number 0 "
                f"{_shown(specs[0].cluster)}: all processes need the same lists in the same order"
            )
        task = (spec.role, spec.index)
        if task in claimed:
            raise ClusterError(
                f"TF_CONFIG numbers {claimed[task]} and {place} both say that they are "
                f"{spec.role}[{spec.index}]: give each process an index of its own"
            )
        claimed[task] = place


def parse_address(address: Any, entry: str = "address") -> tuple[str, int]:
    """Host and port of ``host:port`` (IPv6 in brackets); ``entry`` names it in errors.

    Raises
    ------
    ClusterError
        Where TensorFlow could not use it, or would wait for ever.
    """
    told = f"{entry} = {address!r}"
    if not isinstance(address, str):
        raise ClusterError(f"{told} is no text: expected 'host:port'")
    if address != address.strip() or re.search(r"\s", address):
        raise ClusterError(f"{told} has white space in it, on which TensorFlow hangs: remove it")
    if "://" in address:
        raise ClusterError(f"{told} begins with a protocol: leave {address.split('://')[0]}:// out")
    host, colon, port = address.rpartition(":")
    if not colon or not host or address.endswith("]"):
        raise ClusterError(
            f"{told} has no {'port' if not colon else 'host or port'}: expected 'host:port'"
        )
    if ":" in host and not _IPV6.fullmatch(host):
        raise ClusterError(f"{told}: write an IPv6 address in brackets, as in '[fd00::1]:2222'")
    if not (_NAME.fullmatch(host) or _IPV6.fullmatch(host)):
        raise ClusterError(f"{told}: {host!r} is no host name or address")
    if not re.fullmatch(r"[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        raise ClusterError(f"{told} has port {port!r}: expected a number from 1 to 65535")
    return host, int(port)


def _checked(cluster: Mapping[str, Any], task: Mapping[str, Any]) -> ClusterSpec:
    for role in cluster:
        if role not in ROLES:
            hint = ": its name since TensorFlow 2 is 'chief'" if role == "master" else ""
            raise ClusterError(f"unknown role {role!r}{hint}; expected one of {', '.join(ROLES)}")
    tasks = {role: _tasks(role, cluster[role]) for role in ROLES if role in cluster}
    for role in ("chief", "evaluator"):
        if len(tasks.get(role, {})) > 1:
            raise ClusterError(f"{role} has {len(tasks[role])} addresses: there can be only one")
    if not tasks.get("worker") and not tasks.get("chief"):
        raise ClusterError("the cluster has neither workers nor a chief: list the workers")
    _refuse_duplicates(tasks)
    role, index = _own_task(tasks, task)
    return ClusterSpec(tasks, role, index)


def _tasks(role: str, value: Any) -> dict[int, str]:
    if isinstance(value, str):
        raise ClusterError(
            f"{role} = {value!r} is one text, not a list: write [{value!r}] (in R, "
            "list() or I() keeps a single address a list)"
        )
    if isinstance(value, Mapping):
        for key in value:
            if not re.fullmatch(r"\d+", str(key)) or isinstance(key, bool):
                raise ClusterError(f"{role}[{key!r}]: an index is a whole number from 0")
        tasks = {
            int(key): address for key, address in sorted(value.items(), key=lambda x: int(x[0]))
        }
    elif isinstance(value, Sequence):
        tasks = dict(enumerate(value))
    else:
        raise ClusterError(f"{role} = {value!r}: expected a list of 'host:port'")
    if not tasks:
        raise ClusterError(f"{role} lists no address: leave it out, or fill it")
    for index, address in tasks.items():
        parse_address(address, f"{role}[{index}]")
    return tasks


def _refuse_duplicates(tasks: Mapping[str, Addresses]) -> None:
    seen: dict[tuple[str, int], str] = {}
    for role, addresses in tasks.items():
        for index, address in addresses.items():
            host, port = parse_address(address)
            entry = f"{role}[{index}]"
            where = (host.lower().rstrip("."), port)
            if where in seen:
                raise ClusterError(
                    f"{entry} = {address!r} is the address of {seen[where]} too: one of the two "
                    "processes would hang, so give each a port of its own"
                )
            seen[where] = entry


def _own_task(tasks: Mapping[str, Addresses], task: Mapping[str, Any]) -> tuple[str, int]:
    role, index = task.get("type"), task.get("index")
    if not isinstance(role, str) or role not in ROLES:
        hint = ": its name since TensorFlow 2 is 'chief'" if role == "master" else ""
        raise ClusterError(f"role {role!r} is unknown{hint}; expected one of {', '.join(ROLES)}")
    if role not in tasks:
        raise ClusterError(f"this process is {role!r}, but the cluster lists no {role}: add it")
    if index is None:
        raise ClusterError(f"`index` is missing: which {role} is this process, counting from 0?")
    if isinstance(index, float) and index.is_integer():
        index = int(index)  # R's numbers
    if isinstance(index, bool) or not isinstance(index, int):
        raise ClusterError(f"`index` must be a whole number, not {index!r}")
    if index not in tasks[role]:
        known = sorted(tasks[role])
        raise ClusterError(
            f"`index` is {index}, but the cluster lists {role} "
            f"{known[0]}{f' to {known[-1]}' if len(known) > 1 else ''}"
        )
    return role, index


def _listed(tasks: Addresses) -> Any:
    if sorted(tasks) == list(range(len(tasks))):
        return [tasks[index] for index in range(len(tasks))]
    return {str(index): address for index, address in tasks.items()}


def _shown(cluster: Mapping[str, Addresses]) -> str:
    return "; ".join(f"{role} {', '.join(tasks.values())}" for role, tasks in cluster.items())
