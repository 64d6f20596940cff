"""One worker of a gang on a host of its own: a member that meets the others at the driver.

How its process was started, by ssh or by Slurm, does not matter here. This file is imported on the
workers' hosts.
"""

from __future__ import annotations

import ipaddress
import socket
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pybackend.errors import ClusterError, Failure
from pybackend.job.codec import encode
from pybackend.job.messages import Failed, Reported
from pybackend.job.notice import Notice
from pybackend.launchers.failures import find_fatal
from pybackend.launchers.member import Member
from pybackend.net.meeting_client import MeetingClient
from pybackend.net.rendezvous import own_address

# Files of a bundle.
TASK = "task.pkl"
# Names of what a worker sends to the driver; the model's is followed by its format.
REPORT = "report"
MODEL = "model."


@dataclass(frozen=True)
class RemoteTask:
    """What all workers of a gang have in common, pickled into their bundle.

    Attributes
    ----------
    member
        What each of them does.
    hosts
        The name or address of every rank's host.
    environment
        Variables for the workers' processes.
    """

    member: Member
    hosts: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RemoteGroup:
    """A gang that meets at the driver; see `Group`."""

    rank: int
    hosts: Sequence[str]
    cores: int
    gpus: Sequence[str] | None
    meeting: MeetingClient

    def gather(self, message: str) -> list[str]:
        """See `Group`."""
        everyone = self.meeting.gather(message)
        if everyone is None:
            raise ClusterError(
                f"worker {self.rank} lost the driver before all workers had met: the driver has "
                "ended the job, or the network between them failed. If the driver still runs, "
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
    """Run one worker to its end, and send the driver its report, and rank 0's model.

    Parameters
    ----------
    folder
        That of the bundle.
    cores, gpus
        As in `Group`.
    reached
        An address of this host at which others reach it, if one is known.
    notice
        As in `Child`.

    Returns
    -------
    bool
        Whether the others may go on; if not, the driver was told why.
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
        if model is not None:
            meeting.send(MODEL + model[0], model[1])
        meeting.send(REPORT, encode(report).encode())
        meeting(Reported())
    except Exception as error:
        meeting(Failed(describe_failure(rank, hosts[rank], error)))
        return False
    return not find_fatal(member.job, [report])


def find_own_address(hosts: Sequence[str], rank: int, reached: str | None = None) -> str:
    """The address of this host at which the other ones reach it.

    What its name means here, unless that is only for itself: Debian has 127.0.1.1 for a machine's
    own name. Then where others have ``reached`` it, or else its address on the route to them.

    Raises
    ------
    ClusterError
        If there is none.
    """
    routes = (own_address(host) for host in hosts if host != hosts[rank])
    for address in [*_resolve(hosts[rank]), reached, *routes]:
        if address and _is_own(address):
            return address
    raise ClusterError(
        f"the other hosts cannot reach {hosts[rank]}: that name means no address of this host "
        f"({socket.gethostname()}) but those that are only for itself. Name all hosts by addresses "
        "that they know each other by"
    )


def describe_failure(rank: int, host: str, error: Exception) -> Failure:
    """A failure of the member itself, not of its worker."""
    is_ours = isinstance(error, ClusterError)
    return Failure(
        rank,
        host,
        exception_type=type(error).__name__,
        message=str(error),
        traceback="" if is_ours else "".join(traceback.format_exception(error)),
        time=time.time(),
    )


def _resolve(host: str) -> list[str]:
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:  # a name that only the driver knows
        return []
    return [str(info[4][0]) for info in infos]


def _is_own(address: str) -> bool:
    """Whether it is an address of this machine that others may use."""
    known = ipaddress.ip_address(address.partition("%")[0])
    if known.is_loopback or known.is_link_local:
        return False
    family = socket.AF_INET6 if known.version == 6 else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
