"""Member of a worker group: it has a rank, runs one worker process, and reports.

`Group` hides what started it: a Spark or sparklyr task, ssh, Slurm, Kubernetes, or the user.
Everything else is the same for all of them. This file is imported on the workers' hosts.
"""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pybackend.core.data.row_store import check_layouts, read_layouts, unify_layout
from pybackend.core.errors import ClusterError, Failure, InputError
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.job import Job
from pybackend.core.job.messages import Arrival, Emit, FromLauncher, Order
from pybackend.core.job.notice import Notice
from pybackend.core.job.report import WorkerReport
from pybackend.core.job.worker_options import Resources
from pybackend.core.launchers.child import Child
from pybackend.core.launchers.shares import find_shortage, limit_threads, this_machine
from pybackend.core.machine import look_up, own_address
from pybackend.core.machine.packages import (
    SET_PYSPARK_PYTHON,
    find_difference,
    read_versions,
    read_versions_in,
)
from pybackend.core.net.authentication import derive_token, new_token
from pybackend.core.net.rendezvous import address_of, split_address
from pybackend.core.words import call_of, setting, speak

if TYPE_CHECKING:
    from pybackend.core.launchers.environment.installing import Interpreter


_T = TypeVar("_T")


class Group(Protocol):
    """A worker group, as one of its members sees it."""

    @property
    def rank(self) -> int:
        """Rank of this member."""

    @property
    def hosts(self) -> Sequence[str]:
        """Name or address of every member's host, by rank."""

    @property
    def cores(self) -> int:
        """Cores that this member may use."""

    @property
    def gpus(self) -> Sequence[str] | None:
        """Numbers of the GPUs that this member may use; None: they were not divided."""

    def gather(self, message: str) -> list[str]:
        """Return the messages of all members by rank; all must call this together, once.

        Raises
        ------
        ClusterError
            The members cannot rendezvous.
        """


class RowSource(Protocol):
    """Writer of the rows that a member receives."""

    def spool(self, batches: Iterable[Any], rank: int, folder: Path) -> None:
        """Write this worker's rows as they arrive, into one folder per data set."""


@dataclass(frozen=True)
class Member:
    """Settings that all members of a worker group have in common.

    Attributes
    ----------
    job, files
        The workers' job, and the contents of their files by name.
    source
        Writer of the rows; None if there are no rows.
    token
        The job's secret.
    driver
        ``host:port`` on which the driver listens; None if it does not listen.
    loopback
        True if all members are on one machine.
    counts
        Number of rows of every rank, by data set, if the driver already knows them.
    remedy
        Advice for a user whose hosts have different packages.
    interpreter
        The Python that runs the worker, on the worker's host; None: that of the member's process.
    """

    job: Job
    files: Mapping[str, bytes] = field(repr=False)
    source: RowSource | None
    token: str = field(repr=False)
    driver: str | None
    loopback: bool
    counts: Mapping[str, list[int]] = field(default_factory=dict)
    remedy: str = SET_PYSPARK_PYTHON
    interpreter: Interpreter | None = None

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
        """Run one worker until it reports, possibly a failure; rank 0 returns its model, too.

        ``batches`` are this member's rows, in a form that ``source`` reads. ``emit`` gets the
        worker's events. The other arguments are those of `Child`.
        """
        speak(self.job.language)
        host = self._host(group) if server is None else split_address(address_of(server))[0]
        variables = choose_variables(group, self.job.resources)
        options = (rscript, server, give_up, notice or Notice(), orders, self.interpreter)
        with Child(self.job, group.rank, host, emit, variables, *options) as child:
            child.start(self.files)
            report = self._run(child, group, batches, notice)
            return report, child.model() if group.rank == 0 and report.ok else None

    def _run(
        self, child: Child, group: Group, batches: Iterable[Any], notice: Notice | None
    ) -> WorkerReport:
        error: Exception | None = None
        try:
            check_allotted(group, self.job.resources)
            self.store(batches, child.rank, child.folder)
        except Exception as caught:  # the others must know: else they would wait for this worker
            error = caught
        try:
            everyone = _meet(child, group, error, self.read_packages)
            failure = self._find_obstacle(child, everyone, error)
        except ClusterError as caught:
            failure = _describe(child, error or caught)
        if failure is not None:
            return WorkerReport(child.rank, child.host, child.pid, failure=failure)
        child.go(self._order(child, everyone))
        if notice is None:  # Spark, for example, has its own ways to end a task
            return child.wait()
        with notice.expected(self.job.keeps_checkpoints):
            return child.wait()

    def store(self, batches: Iterable[Any], rank: int, folder: Path) -> None:
        """Write the rows of a rank into one folder per data set, if there are rows."""
        if self.source is not None:
            return self.source.spool(batches, rank, folder)
        for _ in batches:
            pass

    def _order(self, child: Child, everyone: Sequence[Arrival]) -> Order:
        counts = dict(self.counts)
        for name in everyone[0].layouts:
            layouts = [arrival.layouts[name] for arrival in everyone]
            unify_layout(child.folder / name, layouts)
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
        """Return why this worker cannot start; at least one worker reports the cause."""
        if self.job.kind != "run":  # a function may not need TensorFlow
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
        # Each worker has its own cores and GPUs; a machine's memory is not divided.
        memory = Resources(memory=self.job.resources.memory)
        neighbours = sum(arrival.host == child.host for arrival in everyone)
        if shortage := find_shortage(memory, neighbours, this_machine(), child.host):
            return _describe(child, ClusterError(shortage))
        try:
            check_layouts([arrival.layouts for arrival in everyone])
        except InputError as caught:
            return _describe(child, caught)
        return None

    def read_packages(self) -> dict[str, Any]:
        if self.interpreter is None:
            return read_versions()
        return read_versions_in(self.interpreter.python, self.interpreter.sites())

    def _host(self, group: Group) -> str:
        """Return the address at which the other members can reach this host."""
        if self.loopback:
            return "127.0.0.1"
        address = look_up(group.hosts[group.rank])[0]
        if self.driver and address.startswith("127."):
            # Debian maps a machine's own name to an address that no other machine can reach.
            return own_address(split_address(self.driver)[0]) or address
        return address


def _meet(
    child: Child, group: Group, error: Exception | None, read_packages: Callable[[], dict[str, Any]]
) -> list[Arrival]:
    own = Arrival(
        address=child.address,
        reserved=child.reserved,
        host=child.host,
        packages={} if child.job.kind == "run" else read_packages(),
        layouts={} if error else read_layouts(child.folder),
        has_failed=error is not None,
        nonce=new_token(),
        seed=child.job.seed,
    )
    names = [f"worker {rank} on {host}" for rank, host in enumerate(group.hosts)]
    texts = group.gather(encode(own))
    return [
        read_handshake(text, Arrival, names[rank] if rank < len(names) else f"worker {rank}")
        for rank, text in enumerate(texts)
    ]


def read_handshake(text: str, kind: type[_T], name: str) -> _T:
    """Return a handshake message; `ClusterError` names the sender if it cannot be read."""
    try:
        return decode(text, kind)
    except ValueError as error:
        raise ClusterError(
            f"{name} sent an invalid handshake message ({error}): "
            "install the same release of tfdist on all machines"
        ) from error


def choose_variables(group: Group, resources: Resources) -> dict[str, str]:
    """Return the variables that limit a worker's process to its own cores and GPUs."""
    variables = limit_threads(resources.cpus or max(1, group.cores))
    gpus = group.gpus if resources.gpus is None else (group.gpus or [])[: resources.gpus]
    if gpus is not None:
        variables["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return variables


def check_allotted(group: Group, resources: Resources) -> None:
    """Raise `ClusterError` if a member has fewer cores or GPUs than its worker requests."""
    gpus = len(group.gpus or [])
    pairs = {"cpus": (resources.cpus, group.cores), "gpus": (resources.gpus, gpus)}
    for name, (wanted, has) in pairs.items():
        if wanted is not None and wanted > has:
            raise ClusterError(
                f"worker {group.rank} requests {wanted} {name} "
                f"({setting(resources=call_of('Resources', **{name: ...}))}), but was started with "
                f"{has}: request more where it is started, or less in `resources`"
            )


def _describe(child: Child, error: Exception) -> Failure:
    is_ours = isinstance(error, (InputError, ClusterError))
    return Failure(
        child.rank,
        child.host,
        exception_type=type(error).__name__,
        message=str(error),
        traceback="" if is_ours else "".join(traceback.format_exception(error)),
        time=time.time(),
        # The message of a ClusterError contains the advice, because it names the hosts.
        advice="" if isinstance(error, ClusterError) else "fix the data, or choose other columns",
    )


def _stop(child: Child, cause: int) -> Failure:
    return Failure(
        child.rank,
        child.host,
        exception_type="Stopped",
        message=f"did not start because worker {cause} could not start",
        time=time.time(),
    )
