"""Slurm's commands, its view of jobs, nodes and tasks, its errors, and what to change.

This file is imported on the nodes.
"""

from __future__ import annotations

import itertools
import math
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.net.rendezvous import pick_port
from pybackend.core.words import show

_LIST = "; `sinfo -o '%P %l %D %c %m %G'` lists what each partition has"
# Messages of Slurm about a missing program, and of Python about a missing package.
_NO_PYTHON = re.compile(r"error: execve\(\): |^ModuleNotFoundError: No module named")
# Messages of sbatch and reasons of pending jobs; the first match is the most specific.
_ADVICE = {
    r"gres|GRES|TRES": (
        "Change `gpus` of slurm(), or `gres` in its `options`, or choose another "
        "`partition`" + _LIST
    ),
    r"PartitionTimeLimit|[Tt]ime limit|Invalid --time": (
        "Change `time` of slurm(): the limits of the partition are in `sinfo -o '%P %l'`"
    ),
    r"AccountNotAllowed|InvalidAccount|[Aa]ccount/partition": (
        "Set `account` in `options` of slurm() to one of your accounts, or choose another "
        "`partition`; `sacctmgr show associations user=$USER` lists your accounts"
    ),
    r"InvalidQOS|QOSNotAllowed|Invalid qos": (
        "Change `qos` in `options` of slurm(); `sacctmgr show qos` lists all"
    ),
    r"accounting/QOS policy": "Request less: fewer workers, or less `time` in slurm()",
    r"invalid partition|Invalid partition|not permitted to use this partition": (
        "Choose another `partition` of slurm(); `sinfo` lists them"
    ),
    r"PartitionNodeLimit|Node count specification": (
        "Change `nodes` of slurm(), or choose another `partition`" + _LIST
    ),
    r"PartitionConfig|BadConstraints|[Nn]ode configuration|More processors|Memory spec"
    r"|more tasks than": (
        "No node of the partition is large enough. Request less with `nodes`, `cpus` or "
        "`gpus` of slurm() or with `resources`, or choose another `partition`" + _LIST
    ),
    r"Invalid feature": (
        "Change `constraint` in `options` of slurm(); `sinfo -o '%P %f'` lists the features"
    ),
    r"DependencyNeverSatisfied|[Dd]ependency": "Change `dependency` in `options` of slurm()",
    r"unrecognized option|ambiguous|Invalid --|Invalid time specification|Invalid .* spec": (
        "Correct that option in `options` of slurm(); `sbatch --help` lists all options"
    ),
}


def explain_refusal(said: str) -> str:
    """Return advice on which argument of `slurm` to change; empty if the message is unknown."""
    return next((advice for pattern, advice in _ADVICE.items() if re.search(pattern, said)), "")


def explain_log(lines: Iterable[str]) -> str:
    """Return why a task ended right after its start; empty if its log does not show the reason."""
    if not any(map(_NO_PYTHON.search, lines)):
        return ""
    return (
        "`python` of slurm() must be the path of a Python that all nodes have, with the same "
        "packages as this one; by default, it is the path of this one"
    )


# Slurm may send the signal this much too early.
_EARLY_SECONDS = 60
# For shorter jobs, the notice would take too much of their time.
_SHORTEST_MINUTES = 10


def signal_option(time: Any, seconds: float, target: str = "") -> str | None:
    """Return sbatch's option ``signal`` for a job; None if its time limit is too short.

    ``time`` is the limit in sbatch's format (None: that of the partition, typically a day).
    ``seconds`` is from the signal to the limit. With the target ``"B:"``, the batch script gets the
    signal instead of its steps.
    """
    if time is not None and read_minutes(str(time)) < _SHORTEST_MINUTES:
        return None
    return f"{target}TERM@{math.ceil(seconds)}"


def notice_seconds(option: Any) -> float:
    """Return how long before the limit ``signal`` can arrive, at most; 0 if it is not set."""
    found = re.search(r"@(\d+)", str(option or ""))
    return 0.0 if found is None else int(found[1]) + _EARLY_SECONDS


def read_minutes(time: str) -> float:
    """Return the minutes of ``"90"``, ``"1:30:00"`` or ``"2-12:00"``; infinity for other words."""
    if not re.fullmatch(r"[\d:-]+", time):
        return math.inf
    days, dash, rest = time.rpartition("-")
    parts = [int(part or 0) for part in rest.split(":")]
    if dash or len(parts) == 3:  # hours, minutes, seconds
        weights = (60.0, 1.0, 1 / 60)
    else:
        weights = (1.0, 1 / 60, 0.0)
    return int(days or 0) * 1440 + sum(w * p for w, p in zip(weights, parts, strict=False))


_ASK_SECONDS = 60.0
_WAITING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED", "RESIZING")
_RUNNING = ("RUNNING", "COMPLETING", "STAGE_OUT", "SIGNALING", "STOPPED")
# Reasons for which a pending job will never start.
_NEVER = re.compile(
    "AccountNotAllowed|BadConstraints|DependencyNeverSatisfied|InvalidAccount|InvalidQOS|"
    "JobHoldMaxRequeue|PartitionConfig|PartitionNodeLimit|PartitionTimeLimit|QOSNotAllowed"
)


@dataclass(frozen=True)
class SlurmJob:
    """State that ``scontrol show job`` prints.

    Attributes
    ----------
    number
        Job ID.
    state, reason
        Slurm's names: ``"PENDING"``, ``"Resources"``.
    start
        Time of the start, or of the expected start.
    nodes
        Nodes of the job, in Slurm's order.
    is_preempted
        True if another job is preempting it.
    ran, limit
        Elapsed time and time limit, in seconds on Slurm's clock.
    restarts
        Number of times that Slurm has requeued it.
    can_requeue
        True if Slurm may start it again.
    """

    number: str
    state: str
    reason: str = "None"
    start: datetime | None = None
    nodes: tuple[str, ...] = ()
    is_preempted: bool = False
    ran: float = 0.0
    limit: float = math.inf
    restarts: int = 0
    can_requeue: bool = False

    @property
    def seconds_left(self) -> float:
        return self.limit - self.ran

    @property
    def is_over(self) -> bool:
        return self.state not in (*_WAITING, *_RUNNING)

    @property
    def is_running(self) -> bool:
        """True if nodes are allocated to it."""
        return self.state in _RUNNING

    @property
    def is_hopeless(self) -> bool:
        """True if it is pending and will never start."""
        return self.state == "PENDING" and _NEVER.fullmatch(self.reason) is not None

    def describe(self) -> str:
        shown = f"Slurm job {self.number} is {self.state.lower().replace('_', ' ')}"
        if self.is_running:
            return f"{shown} on {', '.join(self.nodes)}"
        if self.reason != "None":
            shown += f": {self.reason}"
        if self.start is not None and not self.is_over:
            is_today = self.start.date() == datetime.now().date()
            form = "%H:%M" if is_today else "%Y-%m-%d %H:%M"
            shown += f", estimated start {self.start.strftime(form)}"
        return shown


def read_job(text: str) -> SlurmJob:
    """Parse a line of ``scontrol show job --oneliner``."""
    # The first of equal names is Slurm's own: the user's texts, such as the comment, come later.
    found = dict(reversed(re.findall(r"(?:^| )(\w+)=(\S*)", text)))
    nodes, start = found.get("NodeList", "(null)"), None
    with suppress(ValueError):  # "Unknown"
        start = datetime.fromisoformat(found.get("StartTime", ""))
    return SlurmJob(
        number=found["JobId"],
        state=found["JobState"],
        reason=found.get("Reason", "None"),
        start=start,
        nodes=() if nodes == "(null)" else tuple(expand_nodes(nodes)),
        is_preempted=found.get("PreemptTime", "None") != "None",
        ran=60 * read_minutes(found.get("RunTime", "00:00:00")),
        limit=60 * read_minutes(found.get("TimeLimit", "UNLIMITED")),
        restarts=int(found.get("Restarts", "0")),
        can_requeue=found.get("Requeue") == "1",
    )


def submit(script: Path) -> str:
    """Submit a script with sbatch, and return the job ID. Raises `ClusterError` with advice."""
    try:
        printed = ask("sbatch", "--parsable", str(script), environment=own_variables())
    except ClusterError as error:
        advice = explain_refusal(str(error))
        raise ClusterError(f"{error}. {advice}" if advice else str(error)) from None
    # The job ID, and after a semicolon the cluster.
    return printed.strip().partition(";")[0]


def batch_script(options: Mapping[str, Any], lines: Sequence[str]) -> str:
    """Return a script that contains sbatch's long options.

    The value True means an option without a value, None omits it.
    """
    head = [
        # sbatch splits the line as a shell does.
        f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={shlex.quote(str(value))}"
        for name, value in options.items()
        if value is not None
    ]
    return "\n".join(["#!/bin/bash", *head, "", *lines, ""])


def srun(options: Mapping[str, Any], command: Sequence[str]) -> list[str]:
    """Return the command that starts one task per worker, and stops all tasks if one fails."""
    given = {"kill-on-bad-exit": 1, "distribution": "block", "mpi": "none", **options}
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return ["srun", *flags, *command]


def own_variables() -> dict[str, str]:
    """Return the environment for a new job or step. This process may be in a job with other limits.

    Slurm stores the variables, and workers do not need the secret of processes that you start
    yourself.
    """
    own = {k: v for k, v in os.environ.items() if k == "SLURM_CONF" or not k.startswith("SLURM_")}
    own.pop("TFDIST_SECRET", None)
    return own


def show_job(number: str) -> SlurmJob:
    """Return the state of a job. Raises `ClusterError` if Slurm no longer knows it."""
    return read_job(ask("scontrol", "show", "job", "--oneliner", number))


def lost_nodes(nodes: tuple[str, ...]) -> list[str]:
    if not nodes:
        return []
    shown = ask("sinfo", "--noheader", "--Node", f"--nodes={','.join(nodes)}", "--format=%N %T")
    states = dict(line.split() for line in shown.splitlines())
    # An asterisk means that a node does not respond.
    return [node for node in nodes if re.match(r"down|fail|.*\*", states.get(node, ""))]


def node_address(partition: str | None) -> str:
    """Return the address of a node of a partition; None: of the default partition."""
    only = [f"--partition={partition}"] if partition else []
    if not (shown := ask("sinfo", "--noheader", "--Node", *only, "--format=%o %P").splitlines()):
        raise ClusterError(f"Slurm has no partition {show(partition)}: `sinfo` lists all")
    # An asterisk marks the default partition.
    return next((line for line in shown if line.endswith("*")), shown[0]).split()[0]


def ask(*command: str, environment: Mapping[str, str] | None = None) -> str:
    """Return the output of one of Slurm's commands.

    Raises `ClusterError` if it is not installed, fails, or takes too long.
    """
    if shutil.which(command[0]) is None:
        raise ClusterError(
            f"`{command[0]}` was not found: start this on a login node of the Slurm cluster, or "
            "add Slurm's commands to PATH"
        )
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=environment,
            timeout=_ASK_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{command[0]} did not respond within {_ASK_SECONDS:g} s") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit status {done.returncode}"
        # For errors of sbatch, `explain_refusal` has the advice.
        by_hand = "" if command[0] == "sbatch" else ". Try it manually on a login node"
        raise ClusterError(f"{command[0]} failed: {said}{by_hand}")
    return done.stdout


# Places of the tasks of a step, by its variables.


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
    _, counts = tasks_by_node(environment)
    return counts[int(environment.get("SLURM_NODEID") or 0)]


def first_host(environment: Mapping[str, str]) -> str:
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
    return max(1, int(environment.get("SLURM_CPUS_ON_NODE") or 1) // count_local(environment))


def expand_nodes(text: str) -> list[str]:
    """Return node names in Slurm's order: ``n2, n10, n11`` for ``n[2,10-11]``."""
    # Not by `scontrol show hostnames`, which is missing in most containers. A comma within brackets
    # does not separate nodes.
    found: list[str] = []
    for node in re.findall(r"(?:[^,\[\s]|\[[^\]]*\])+", text):
        parts = re.split(r"\[([^\]]*)\]", node)
        choices = [_numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
        found += map("".join, itertools.product(*choices))
    return found


def expand_counts(text: str) -> list[int]:
    """Return the number of tasks on each node: ``2, 1, 1`` for ``2,1(x2)``."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in found for _ in range(int(times or 1))]


def _numbers(ranges: str) -> list[str]:
    """Return ``007, 008, 012`` for ``007-008,012``."""
    found: list[str] = []
    for first, last in re.findall(r"(\w+)(?:-(\w+))?", ranges):
        numbers = range(int(first), int(last) + 1) if last else ()
        found += [f"{number:0{len(first)}d}" for number in numbers] or [first]
    return found


PER_NODE = "ntasks-per-node"


def as_count(value: Any) -> int | None:
    """Return a number of nodes or tasks; None if Slurm may choose it, as for ``2-4`` nodes."""
    text = str(value)
    return int(text) if text.isdecimal() and int(text) else None


def count_tasks(nodes: int | None, per_node: int | None) -> int | None:
    """Return the number of tasks in a job: ``per_node`` on each node, or one; None if unknown."""
    return None if nodes is None else nodes * (per_node or 1)


def check_tasks(workers: int, nodes: int | None, per_node: int | None) -> None:
    """Check that workers can be distributed over nodes. Slurm decides numbers that are None.

    Raises `InputError` if a node would have no worker, or the numbers are inconsistent.
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
