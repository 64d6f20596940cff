"""Connect processes that users start themselves, and compare their calls before starting."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.messages import Emit, Note
from pybackend.core.job.resources import Resources
from pybackend.core.launchers.joined.claims import find_disagreement
from pybackend.core.launchers.member import Member, read_arrival
from pybackend.core.launchers.place import Place, split_host
from pybackend.core.launchers.shares import Machine, find_shortage, share_of_machine, this_machine
from pybackend.core.launchers.slurm.nodes import count_cores
from pybackend.core.machine import is_loopback, own_address, resolve
from pybackend.core.machine.capacity import list_gpus
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.meeting_client import MeetingClient
from pybackend.core.net.rendezvous import listen, split_address

_LOOK_SECONDS = 0.1
_FIRST_NOTE_SECONDS = 2.0
# The first process has the same time limit, and reports which processes are missing.
_SLACK_SECONDS = 5.0
_DEVICES = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Claimed:
    """Handshake message of a process.

    Attributes
    ----------
    message
        Message from the process's `Member`.
    claims
        Description of its call, for the comparison.
    shortage
        Message if its machine does not have enough for its workers, else None.
    """

    message: str
    claims: Mapping[str, Any]
    shortage: str | None = None


@dataclass(frozen=True)
class JoinedCall:
    """A call that is running in this process."""

    place: Place
    member: Member
    claims: Mapping[str, Any]
    emit: Emit

    def note(self, text: str) -> None:
        """Show a note to the user of this process."""
        self.emit(Note(text))


class CallGroup:
    """The processes in a call, as a `Group`.

    ``meet`` sends a message to all processes, and returns the messages of all, by rank.
    """

    def __init__(self, call: JoinedCall, meet: Callable[[str], Sequence[str]]) -> None:
        self._call = call
        self._meet = meet
        self.error: Exception | None = None
        self.job = call.member.job
        place = call.place
        self.rank = place.rank
        self.hosts = [split_host(peer) for peer in place.peers]
        share = find_share(place, call.member.job.resources)
        self.cores, self.gpus, self._shortage = share.cores, share.gpus, share.shortage

    def gather(self, message: str) -> list[str]:
        """Gather the messages; store errors in ``error``, as they do not concern the worker."""
        try:
            own = encode(Claimed(message, self._call.claims, self._shortage))
            texts = self._meet(own)
            names = [self._call.place.name(rank) for rank in range(len(texts))]
            everyone = list(map(_read, texts, names))
            differs = find_disagreement(names, [claimed.claims for claimed in everyone])
            shortages = [claimed.shortage for claimed in everyone if claimed.shortage]
            if differs is not None or shortages:
                raise InputError(differs or shortages[0])
        except (ClusterError, InputError) as error:
            self.error = error
            raise ClusterError(str(error)) from error
        seed = read_arrival(everyone[0].message, names[0]).seed
        self.job = replace(self.job, seed=self.job.seed if seed is None else seed)
        return [claimed.message for claimed in everyone]


def _read(text: str, name: str) -> Claimed:
    try:
        return decode(text, Claimed)
    except ValueError as error:
        raise ClusterError(
            f"{name} sent an invalid handshake message ({error}): install the same release of "
            "tfdist on all machines"
        ) from error


class Reminder:
    """Reminder, at increasing intervals, of what this process is waiting for."""

    def __init__(self, call: JoinedCall) -> None:
        self._call = call
        self._began = time.monotonic()
        self._pause = _FIRST_NOTE_SECONDS

    def look(self, what: str) -> None:
        """Show a note if the interval has passed."""
        waited = time.monotonic() - self._began
        if waited > self._pause:
            self._pause *= 4
            self._call.note(f"waiting for {what}, for {waited:.0f} s so far")


def meet_others(call: JoinedCall, server: MeetingServer, message: str) -> Sequence[str]:
    """Meet the others, which connect to this process, the first one."""
    place, limit = call.place, call.member.job.timeout
    server.join(0, message)
    reminder = Reminder(call)

    def name(ranks: Sequence[int]) -> str:
        return ", ".join(map(place.name, ranks))

    def refuse(reason: str) -> NoReturn:
        server.refuse(reason)
        raise ClusterError(reason)

    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        everyone = server.wait_for_all(_LOOK_SECONDS)
        if everyone is not None:
            return everyone
        missing = server.missing()[0]
        if left := [rank for rank in missing if server.has_left(rank)]:
            refuse(f"{name(left)} connected, then ended: see what it printed")
        reminder.look(name(missing))
    rejected = server.rejected()
    found = f" ({rejected} connections had the wrong secret)" if rejected else ""
    refuse(
        f"{name(server.missing()[0])} did not connect within {limit:g} s. All {place.size} "
        f"processes must make this call, and reach {place.meeting}{found}; `timeout` sets how long "
        "each waits"
    )


def meet_first(call: JoinedCall, client: MeetingClient, message: str) -> Sequence[str]:
    """Meet the others at the first process."""
    place, reminder = call.place, Reminder(call)
    while not client.wait_until_settled(_LOOK_SECONDS):
        reminder.look(place.name(0))
    if client.error is not None:
        raise ClusterError(_explain_unreachable(call, client.error))
    began = time.monotonic()
    deadline = began + call.member.job.timeout + _SLACK_SECONDS

    def look() -> None:
        reminder.look(f"the others, at {place.name(0)}")
        if time.monotonic() > deadline:
            raise ClusterError(
                f"{place.name(0)} still waits for others after {deadline - began:.0f} s: all "
                f"{place.size} processes must make this call"
            )

    everyone = client.gather(message, look)
    if everyone is None:
        raise ClusterError(
            f"{place.name(0)} closed the connection before all processes had connected. See "
            f"its own error, or check whether another process is also {place.name(place.rank)}"
        )
    return everyone


def _explain_unreachable(call: JoinedCall, error: Exception) -> str:
    place = call.place
    if isinstance(error, socket.gaierror):
        return f"this host cannot resolve {place.meeting}, where the processes rendezvous: {error}"
    if isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError):
        return (
            f"{place.name(0)} at {place.meeting} does not accept {place.name(place.rank)}: the two "
            "have different secrets (TFDIST_SECRET, TFDIST_SECRET_FILE, ~/.config/tfdist/secret), "
            "another program listens there, or another process has the same index"
        )
    return (
        f"{place.name(0)} did not respond at {place.meeting} within "
        f"{call.member.job.timeout:g} s ({error}). Start the same script there; `timeout` sets how "
        "long each process waits"
    )


def open_server(place: Place) -> socket.socket:
    """Open the socket for the other processes, at the address that they connect to."""
    address = place.meeting if place.rank == 0 else place.own
    if address is None:
        host = own_address(split_host(find_meeting(place)))
        return listen(host or socket.gethostname())
    host, port = split_address(address)
    try:
        return listen(_reachable(host, place), port)
    except ClusterError as error:
        raise ClusterError(
            f"{place.source} specifies that this process ({socket.gethostname()}, process id "
            f"{os.getpid()}) is worker {place.rank} of {place.size}, at {address}, but it {error}. "
            "Does another process have the same index?"
        ) from error


def find_meeting(place: Place) -> str:
    """Return ``host:port`` of the first process, which may be on the same host."""
    host, port = split_address(place.meeting)
    known = resolve(host)
    if place.is_one_machine or not known or not is_loopback(known[0]):
        return place.meeting
    found = _reachable(host, place)
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"


def _reachable(host: str, place: Place) -> str:
    """Resolve a name to an address that others can reach; Debian maps its own name to loopback."""
    known = resolve(host)
    if not known:
        return host  # `listen` reports the error
    if not is_loopback(known[0]) or place.is_one_machine:
        return known[0]
    others = [split_host(peer) for rank, peer in enumerate(place.peers) if rank != place.rank]
    routes = (own_address(other) for other in [split_host(place.meeting), *others])
    return next((route for route in routes if route and not is_loopback(route)), known[0])


# Share of the machine for a process, which its launcher may have divided.


@dataclass(frozen=True)
class JoinedShare:
    """Cores and GPUs for a process's worker, and a message if its machine has too few.

    ``gpus`` is None if they were not divided.
    """

    cores: int
    gpus: Sequence[str] | None
    shortage: str | None


def find_share(
    place: Place,
    resources: Resources,
    environment: Mapping[str, str] = os.environ,
    machine: Machine | None = None,
) -> JoinedShare:
    """Return the share of a process.

    Parameters
    ----------
    environment
        Variables of the process.
    machine
        The machine of the process; None: this one.
    """
    machine = machine or this_machine()
    own = share_of_machine(place.local_size, environment, resources, machine.gpus)[place.local_rank]
    cores, devices = int(own["TF_NUM_INTRAOP_THREADS"]), own.get(_DEVICES)
    if place.source == "srun":
        allotted = count_cores(environment)
        machine = replace(machine, cores=allotted * place.local_size)
        cores = resources.cpus or allotted
    if _is_divided(place, environment):
        given = list_gpus(environment)
        machine = replace(machine, gpus=given * place.local_size)
        devices = ",".join(given[: resources.gpus])
    gpus = None if devices is None else [number for number in devices.split(",") if number]
    name = f"the machine of {place.name(place.rank)}"
    return JoinedShare(cores, gpus, find_shortage(resources, place.local_size, machine, name))


def _is_divided(place: Place, environment: Mapping[str, str]) -> bool:
    """Return whether Slurm or a script launcher has divided the GPUs."""
    return _DEVICES in environment and (place.source == "srun" or "LOCAL_RANK" in environment)
