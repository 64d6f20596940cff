"""One worker on another host: what it is sent, and how it takes part.

It is a member of a group, or one of elastic training. It is the same however its process is
started, e.g. by ssh or Slurm. This file is imported on the workers' hosts.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle

from pybackend.core.data.arrays import Columns, count_rows, shard
from pybackend.core.data.row_store import check_layouts, digest_rows, read_layouts, write_columns
from pybackend.core.errors import ClusterError, Failure
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.job import TRAINED, Job
from pybackend.core.job.messages import Announced, Failed, FromLauncher, Order, Reported
from pybackend.core.job.notice import Notice
from pybackend.core.job.report import WorkerReport
from pybackend.core.launchers.child import Child
from pybackend.core.launchers.crew import find_fatal
from pybackend.core.launchers.member import Member, check_allotted, choose_variables
from pybackend.core.launchers.remote.bundle import library
from pybackend.core.machine import is_own_address, own_address, resolve
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.meeting_client import MeetingClient

# Files of a bundle: a `RemoteTask`, and a `Post`.
TASK = "task.pkl"
POST = "post.json"
# Names of a worker's results for the driver; the model's is followed by its format.
REPORT = "report"
MODEL = "model."
# Names under which a worker of elastic training announces its packages, and a digest of its rows.
PACKAGES, ROWS = "packages", "rows"


@dataclass(frozen=True)
class RemoteTask:
    """Settings that all workers of a group have in common, pickled into their bundle.

    Attributes
    ----------
    member
        Settings of each member.
    hosts
        Name or address of every rank's host.
    environment
        Variables for the workers' processes.
    """

    member: Member
    hosts: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Post:
    """Settings of a single worker in elastic training.

    Attributes
    ----------
    number
        Number of the worker.
    host_index
        Index of its host in the task's ``hosts``.
    compares_rows
        True if workers compute their rows separately, and might get different ones.
    """

    number: int
    host_index: int = 0
    compares_rows: bool = False


def read_task(folder: Path, meetings: Mapping[int, MeetingClient]) -> RemoteTask | None:
    """Load the task of a bundle's folder; None if it fails, which each rank then reports."""
    try:
        # Pickled by the driver, and sent over a connection with which only it reaches this host.
        task: RemoteTask = cloudpickle.loads((folder / TASK).read_bytes())
    except Exception as error:  # such as a missing package
        for rank, meeting in meetings.items():
            meeting(Failed(describe_failure(rank, os.uname().nodename, error)))
        return None
    return task


def read_post(folder: Path) -> Post | None:
    path = folder / POST
    return decode(path.read_bytes(), Post) if path.exists() else None


@dataclass(frozen=True)
class RemoteGroup:
    """A `Group` that meets at the driver."""

    rank: int
    hosts: Sequence[str]
    cores: int
    gpus: Sequence[str] | None
    meeting: MeetingClient

    def gather(self, message: str) -> list[str]:
        if (everyone := self.meeting.gather(message)) is not None:
            return everyone
        raise ClusterError(
            f"worker {self.rank} lost the driver before all workers had connected: the driver "
            "ended the job, or the network failed. If the driver is still running, start again"
        )


def take_part(
    task: RemoteTask,
    rank: int,
    batches: Iterable[Any],
    meeting: MeetingClient,
    cores: int,
    gpus: Sequence[str] | None,
    reached: str | None = None,
    notice: Notice | None = None,
    post: Post | None = None,
    give_up: Callable[[], str | None] = lambda: None,
) -> bool:
    """Run one worker to completion, and send the driver its report and, from rank 0, the model.

    ``rank`` is 0 in elastic training, where each worker has its own meeting and a ``post``.
    ``batches`` are rows in a form that the member's source reads, such as the folder of the bundle.
    ``cores`` and ``gpus`` are as in `Group`, ``notice`` and ``give_up`` as in `Child`. ``reached``
    is an address at which others can reach this host, if one is known. Returns True if the others
    can continue; if not, the reason was sent to the driver.
    """
    hosts, index = list(task.hosts), rank if post is None else post.host_index
    member = task.member
    try:
        if not member.loopback:
            hosts[index] = find_own_address(task.hosts, index, reached)
        group = RemoteGroup(post.number if post else rank, hosts, cores, gpus, meeting)
        if post is None:
            options = None, None, give_up, notice, meeting.poll_order
            report, model = member.work(group, batches, meeting, *options)
        else:
            report, model = _follow_orders(member, group, post, batches, notice, give_up)
        send_results(meeting, report, model)
        meeting(Reported())
    except Exception as error:
        meeting(Failed(describe_failure(rank, hosts[index], error)))
        return False
    return not find_fatal(member.job, [report])


def _follow_orders(
    member: Member,
    group: RemoteGroup,
    post: Post,
    batches: Iterable[Any],
    notice: Notice | None,
    give_up: Callable[[], str | None],
) -> tuple[WorkerReport, tuple[str, bytes] | None]:
    """Run one worker of elastic training, which gets its rank from the driver's orders."""
    check_allotted(group, member.job.resources)
    variables = choose_variables(group, member.job.resources)
    host = "127.0.0.1" if member.loopback else group.hosts[post.host_index]
    meeting, counts = group.meeting, dict[str, list[int]]()
    meeting(Announced(PACKAGES, json.dumps(member.read_packages())))

    def next_order() -> FromLauncher | None:
        order = meeting.poll_order()
        if isinstance(order, Order):  # the driver may not know the number of rows
            order = replace(order, counts={**counts, **order.counts})
        return order

    options = None, None, give_up, notice or Notice(), next_order, member.interpreter
    with Child(member.job, post.number, host, meeting, variables, *options) as child:
        member.store(batches, 0, child.folder)
        layouts = read_layouts(child.folder)
        check_layouts([layouts])
        # First: when the worker stands by, the others may begin a generation with it.
        counts.update({name: [layout["rows"]] for name, layout in layouts.items()})
        if post.compares_rows:
            digests = {name: digest_rows(child.folder / name) for name in counts}
            meeting(Announced(ROWS, json.dumps(digests)))
        child.start(member.files)
        report = replace(child.wait(), rank=0)
        if report.failure is None:
            return report, child.model()
        return replace(report, failure=replace(report.failure, rank=0)), None


def send_results(
    meeting: MeetingClient, report: WorkerReport, model: tuple[str, bytes] | None
) -> None:
    if model is not None:
        meeting.send(MODEL + model[0], model[1])
    meeting.send(REPORT, encode(report).encode())


def receive_model(meeting: MeetingServer) -> tuple[str, bytes] | None:
    """Return the format and the content of the model that rank 0 has sent."""
    found = ((kind, meeting.result(0, MODEL + kind)) for kind in TRAINED)
    return next(((kind, content) for kind, content in found if content is not None), None)


def find_own_address(hosts: Sequence[str], rank: int, reached: str | None = None) -> str:
    """Return the address at which the others can reach this host; else raise `ClusterError`.

    This is the address that its name resolves to, unless that is a loopback address: Debian maps a
    machine's own name to 127.0.1.1. In that case it is ``reached``, or else the address on the
    route to the others.
    """
    routes = (own_address(host) for host in hosts if host != hosts[rank])
    for address in [*resolve(hosts[rank]), reached, *routes]:
        if address and is_own_address(address):
            return address
    raise ClusterError(
        f"the other hosts cannot reach {hosts[rank]}: on this host ({socket.gethostname()}), that "
        "name has only loopback addresses, or addresses of other hosts. Name all hosts by "
        "addresses under which they can reach each other"
    )


def describe_failure(rank: int, host: str, error: Exception) -> Failure:
    """Return a failure of the member itself, not of its worker."""
    is_ours = isinstance(error, ClusterError)
    frames = "" if is_ours else "".join(traceback.format_exception(error))
    return Failure(rank, host, type(error).__name__, str(error), frames, time=time.time())


_FOLDER = "rows"
# In place of a rank: rows that all workers have.
_ALL = "all"


def pack_task(task: RemoteTask, folder: Path, datasets: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the contents of every worker's `Bundle`, without its rows, which ``folder`` gets."""
    if datasets:
        counts = write_rows(folder, task.member.job, datasets)
        task = replace(task, member=replace(task.member, source=RowFolder(), counts=counts))
    return {**library(), TASK: cloudpickle.dumps(task)}


def write_rows(folder: Path, job: Job, datasets: Mapping[str, Columns]) -> dict[str, list[int]]:
    """Write each rank's rows into a folder, and return their numbers by data set."""
    counts = {}
    for name, columns in datasets.items():
        parts = [shard(columns, job.workers, rank) for rank in range(job.workers)]
        counts[name] = [count_rows(part) for part in parts]
        (folder / _FOLDER / name).mkdir(parents=True)
        has_all = job.is_elastic or (name == "train" and job.shuffles_globally)
        for rank, part in {_ALL: columns}.items() if has_all else enumerate(parts):
            write_columns(folder / _FOLDER / name / str(rank), part)
    return counts


def files_of_ranks(folder: Path, ranks: Iterable[int]) -> dict[str, bytes | Path]:
    """Return the files written by `write_rows` for some ranks, by their names in the folder."""
    wanted = {_ALL, *map(str, ranks)}
    return {
        str(path.relative_to(folder)): path
        for path in sorted((folder / _FOLDER).glob("*/*/*"))
        if path.parent.name in wanted
    }


@dataclass(frozen=True)
class RowFolder:
    """A `Source` for members whose input is a folder written by `write_rows`."""

    def spool(self, batches: Iterable[Any], rank: int, folder: Path) -> None:
        for given in batches:
            for data_set in sorted(Path(given, _FOLDER).iterdir()):
                own = data_set / str(rank)
                _link(own if own.is_dir() else data_set / _ALL, folder / data_set.name)


def _link(source: Path, folder: Path) -> None:
    """Create a folder with the same rows, without copying them if possible."""
    folder.mkdir()
    for file in source.iterdir():
        target = folder / file.name
        if file.suffix == ".npy":  # the description is written again
            with suppress(OSError):  # on another disk
                os.link(file, target)
                continue
        shutil.copyfile(file, target)
