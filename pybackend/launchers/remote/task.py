"""One worker of a group on another host: a member that meets the others at the driver.

It is the same however its process is started, e.g. by ssh or Slurm. This file is imported on the
workers' hosts.
"""

from __future__ import annotations

import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pybackend.errors import ClusterError, Failure
from pybackend.job.codec import encode
from pybackend.job.job import TRAINED
from pybackend.job.messages import Failed, Reported
from pybackend.job.notice import Notice
from pybackend.job.report import WorkerReport
from pybackend.launchers.crew import find_fatal
from pybackend.launchers.member import Member
from pybackend.machine.identity import is_own_address, own_address, resolve
from pybackend.net.meeting import MeetingServer
from pybackend.net.meeting_client import MeetingClient

# Files of a bundle.
TASK = "task.pkl"
# Names of a worker's results for the driver; the model's is followed by its format.
REPORT = "report"
MODEL = "model."


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
class RemoteGroup:
    """A `Group` that meets at the driver."""

    rank: int
    hosts: Sequence[str]
    cores: int
    gpus: Sequence[str] | None
    meeting: MeetingClient

    def gather(self, message: str) -> list[str]:
        everyone = self.meeting.gather(message)
        if everyone is None:
            raise ClusterError(
                f"worker {self.rank} lost the driver before all workers had connected: the driver "
                "ended the job, or the network connection failed. If the driver is still running, "
                "start again"
            )
        return everyone


def take_part(
    task: RemoteTask,
    rank: int,
    folder: Path,
    meeting: MeetingClient,
    cores: int,
    gpus: Sequence[str] | None,
    reached: str | None = None,
    notice: Notice | None = None,
) -> bool:
    """Run one worker to completion, and send the driver its report and, from rank 0, the model.

    Parameters
    ----------
    folder
        Folder of the bundle.
    cores, gpus
        As in `Group`.
    reached
        An address at which others can reach this host, if one is known.
    notice
        As in `Child`.

    Returns
    -------
    bool
        True if the others can continue; if not, the reason was sent to the driver.
    """
    hosts = list(task.hosts)
    member = task.member
    try:
        if not member.loopback:
            hosts[rank] = find_own_address(task.hosts, rank, reached)
        group = RemoteGroup(rank, hosts, cores, gpus, meeting)
        report, model = member.work(
            group, [folder], meeting, notice=notice, orders=meeting.poll_order
        )
        send_results(meeting, report, model)
        meeting(Reported())
    except Exception as error:
        meeting(Failed(describe_failure(rank, hosts[rank], error)))
        return False
    return not find_fatal(member.job, [report])


def send_results(
    meeting: MeetingClient, report: WorkerReport, model: tuple[str, bytes] | None
) -> None:
    """Send the driver a worker's report and, from rank 0, the model and its format."""
    if model is not None:
        meeting.send(MODEL + model[0], model[1])
    meeting.send(REPORT, encode(report).encode())


def receive_model(meeting: MeetingServer) -> tuple[str, bytes] | None:
    """Return the model that rank 0 has sent, and its format."""
    found = ((kind, meeting.result(0, MODEL + kind)) for kind in TRAINED)
    return next(((kind, content) for kind, content in found if content is not None), None)


def find_own_address(hosts: Sequence[str], rank: int, reached: str | None = None) -> str:
    """Return the address at which the others can reach this host.

    This is the address that its name resolves to, unless that is a loopback address: Debian maps a
    machine's own name to 127.0.1.1. In that case it is ``reached``, or else the address on the
    route to the others.

    Raises
    ------
    ClusterError
        There is no such address.
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
    return Failure(
        rank,
        host,
        exception_type=type(error).__name__,
        message=str(error),
        traceback="" if is_ours else "".join(traceback.format_exception(error)),
        time=time.time(),
    )
