"""A member of a gang: it has a rank among others, runs one worker process, and reports.

What it is part of, a task of Spark or of sparklyr, a process that ssh or Slurm has started, is
behind `Group`; all else is the same everywhere. This file is imported on the workers' hosts.
"""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from pybackend.data.layout import check_layouts, read_layouts
from pybackend.data.spool import settle_layout
from pybackend.errors import ClusterError, Failure, InputError
from pybackend.job.codec import decode, encode
from pybackend.job.job import Job
from pybackend.job.messages import Arrival, Emit, FromLauncher, Order
from pybackend.job.notice import Notice
from pybackend.job.packages import SET_PYSPARK_PYTHON, find_difference, read_versions
from pybackend.job.report import WorkerReport
from pybackend.job.resources import Resources
from pybackend.launchers.child import Child
from pybackend.launchers.machine_share import find_shortage, limit_threads, this_machine
from pybackend.net.rendezvous import address_of, new_token, own_address, split_address
from pybackend.net.secret import derive_token


class Group(Protocol):
    """What a member knows of its gang."""

    @property
    def rank(self) -> int:
        """This member's number."""

    @property
    def hosts(self) -> Sequence[str]:
        """The name or address of every member's host, by rank."""

    @property
    def cores(self) -> int:
        """Cores that this member may use."""

    @property
    def gpus(self) -> Sequence[str] | None:
        """Numbers of the GPUs that this member may use; None: nobody has divided them."""

    def gather(self, message: str) -> list[str]:
        """Everyone's messages by rank; all members call it together, once.

        Raises
        ------
        ClusterError
            If the members cannot meet.
        """


class Source(Protocol):
    """How a member writes down the rows that it is given."""

    def spool(self, batches: Iterable[Any], rank: int, folder: Path) -> None:
        """Write this worker's rows as they come, a folder for each data set."""


@dataclass(frozen=True)
class Member:
    """All that the members of a gang have in common.

    Attributes
    ----------
    job, files
        What the workers do, and the content by name of the files that they get.
    source
        How rows are read; None if there are none.
    token
        The job's secret.
    driver
        ``host:port`` at which the driver listens; None if it does not.
    loopback
        Whether all members are on one machine.
    counts
        Rows of every rank, by data set, if the driver knows them already.
    remedy
        What a user may do if hosts have other packages than others.
    """

    job: Job
    files: Mapping[str, bytes] = field(repr=False)
    source: Source | None
    token: str = field(repr=False)
    driver: str | None
    loopback: bool
    counts: Mapping[str, list[int]] = field(default_factory=dict)
    remedy: str = SET_PYSPARK_PYTHON

    def work(
        self,
        group: Group,
        batches: Iterable[Any],
        emit: Emit,
        rscript: str | None = None,
        server: socket.socket | None = None,
        give_up: Callable[[], str | None] = lambda: None,
        notice: Notice | None = None,
        orders: Callable[[], FromLauncher | None] = lambda: None,
    ) -> tuple[WorkerReport, tuple[str, bytes] | None]:
        """Run one worker, to its report.

        Parameters
        ----------
        batches
            This member's rows, in whatever form ``source`` reads.
        emit
            Receives the worker's events.
        rscript, server, give_up, notice, orders
            As in `Child`.

        Returns
        -------
        tuple
            The report, which may be of a failure; on rank 0 also the model's format and content.
        """
        host = self._host(group) if server is None else split_address(address_of(server))[0]
        variables = choose_variables(group, self.job.resources)
        options = (rscript, server, give_up, notice or Notice(), orders)
        with Child(self.job, group.rank, host, emit, variables, *options) as child:
            child.start(self.files)
            report = self._run(child, group, batches, notice)
            return report, child.model() if group.rank == 0 and report.ok else None

    def _run(
        self, child: Child, group: Group, batches: Iterable[Any], notice: Notice | None
    ) -> WorkerReport:
        """Feed the worker, bring it together with the others, and wait for its end."""
        error: Exception | None = None
        try:
            check_allotted(group, self.job.resources)
            if self.source is None:
                for _ in batches:
                    pass
            else:
                self.source.spool(batches, child.rank, child.folder)
        except Exception as caught:  # the others must know: else they would wait for this worker
            error = caught
        try:
            everyone = _meet(child, group, error)
            failure = self._find_obstacle(child, everyone, error)
        except ClusterError as caught:
            failure = _describe(child, error or caught)
        if failure is not None:
            return WorkerReport(child.rank, child.host, child.pid, failure=failure)
        child.go(self._order(child, everyone))
        if notice is None:  # of Spark, say, which has its own ways to end a task
            return child.wait()
        with notice.expected(self.job.keeps_checkpoints):
            return child.wait()

    def _order(self, child: Child, everyone: Sequence[Arrival]) -> Order:
        counts = dict(self.counts)
        for name in everyone[0].layouts:
            layouts = [arrival.layouts[name] for arrival in everyone]
            settle_layout(child.folder / name, layouts)
            counts.setdefault(name, [layout["rows"] for layout in layouts])
        return Order(
            token=derive_token(self.token, *(arrival.nonce for arrival in everyone)),
            peers=tuple(arrival.address for arrival in everyone),
            reserved=tuple(arrival.reserved for arrival in everyone if arrival.reserved),
            counts=counts,
            seed=everyone[0].seed,
        )

    def _find_obstacle(
        self, child: Child, everyone: Sequence[Arrival], error: Exception | None
    ) -> Failure | None:
        """Why this worker does not start; of all that do not, one at least has the cause."""
        if self.job.kind != "run":  # a function may do without TensorFlow
            hosts = [arrival.host for arrival in everyone]
            packages = [arrival.packages for arrival in everyone]
            found = find_difference(hosts, packages, self.remedy)
            if found is not None:
                rank, message = found
                is_here = rank == child.rank
                return _describe(child, ClusterError(message)) if is_here else _stop(child, rank)
        failed = [rank for rank, arrival in enumerate(everyone) if arrival.has_failed]
        if failed:
            return _describe(child, error) if error else _stop(child, failed[0])
        if shortage := _find_shortage(child, everyone):
            return _describe(child, ClusterError(shortage))
        try:
            check_layouts([arrival.layouts for arrival in everyone])
        except InputError as caught:
            return _describe(child, caught)
        return None

    def _host(self, group: Group) -> str:
        """The address of this host at which the other members reach it."""
        if self.loopback:
            return "127.0.0.1"
        address = _resolve(group.hosts[group.rank])
        if self.driver and address.startswith("127."):
            # Debian gives a machine's own name an address that no other machine can reach.
            return own_address(split_address(self.driver)[0]) or address
        return address


def _meet(child: Child, group: Group, error: Exception | None) -> list[Arrival]:
    own = Arrival(
        address=child.address,
        reserved=child.reserved,
        host=child.host,
        packages=read_versions() if child.job.kind != "run" else {},
        layouts={} if error else read_layouts(child.folder),
        has_failed=error is not None,
        nonce=new_token(),
        seed=child.job.seed,
    )
    names = [f"worker {rank} on {host}" for rank, host in enumerate(group.hosts)]
    texts = group.gather(encode(own))
    return [
        read_arrival(text, names[rank] if rank < len(names) else f"worker {rank}")
        for rank, text in enumerate(texts)
    ]


def read_arrival(text: str, name: str) -> Arrival:
    """What a member has said when it met the others.

    Raises
    ------
    ClusterError
        It cannot be read; names the member.
    """
    try:
        return decode(text, Arrival)
    except ValueError as error:
        raise ClusterError(
            f"{name} has said something that makes no sense when it met the others ({error}): "
            "install the same release of tfdist on all machines"
        ) from error


def choose_variables(group: Group, resources: Resources) -> dict[str, str]:
    """Variables by which a worker's process uses its own cores and GPUs only."""
    variables = limit_threads(resources.cpus or max(1, group.cores))
    gpus = group.gpus if resources.gpus is None else (group.gpus or [])[: resources.gpus]
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return variables


def check_allotted(group: Group, resources: Resources) -> None:
    """Raise `ClusterError` if a member was given less than its worker is to have."""
    gpus = len(group.gpus or [])
    pairs = {"cpus": (resources.cpus, group.cores), "gpus": (resources.gpus, gpus)}
    for name, (wanted, has) in pairs.items():
        if wanted is not None and wanted > has:
            raise ClusterError(
                f"worker {group.rank} is to have {wanted} {name} "
                f"(resources=Resources({name}=...)), but whatever has started it gives it {has}: "
                "ask for more there, or for less in `resources`"
            )


def _find_shortage(child: Child, everyone: Sequence[Arrival]) -> str | None:
    """What this machine lacks for all workers on it."""
    neighbours = sum(arrival.host == child.host for arrival in everyone)
    # Cores and GPUs are what each was given; nobody divides a machine's memory.
    wanted = Resources(memory=child.job.resources.memory)
    return find_shortage(wanted, neighbours, this_machine(), child.host)


def _resolve(host: str) -> str:
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])


def _describe(child: Child, error: Exception) -> Failure:
    is_ours = isinstance(error, (InputError, ClusterError))
    return Failure(
        child.rank,
        child.host,
        exception_type=type(error).__name__,
        message=str(error),
        traceback="" if is_ours else "".join(traceback.format_exception(error)),
        time=time.time(),
        # What to do about the cluster is in the message, which knows the hosts.
        advice="" if isinstance(error, ClusterError) else "fix the data, or choose other columns",
    )


def _stop(child: Child, cause: int) -> Failure:
    return Failure(
        child.rank,
        child.host,
        exception_type="Stopped",
        message=f"did not start because worker {cause} could not",
        time=time.time(),
    )
