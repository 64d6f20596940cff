"""Connect processes that users start themselves, and compare their calls, which must agree."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from io import BytesIO
from typing import Any

import cloudpickle
import numpy as np

import pybackend
from pybackend.core.data.arrays import Ragged, count_rows
from pybackend.core.data.checkpoint_checks import digest_text
from pybackend.core.data.sources import FileRows
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.codec import encode
from pybackend.core.job.job import EXTRAS, MODEL_FILE, SOURCE, Job, TrainingJob, argument_of
from pybackend.core.job.messages import Arrival, Emit, Note
from pybackend.core.job.worker_options import Resources
from pybackend.core.launchers.joined.place import Place, join_address, split_host
from pybackend.core.launchers.member import Member, read_handshake
from pybackend.core.launchers.shares import Machine, find_shortage, share_of_machine, this_machine
from pybackend.core.launchers.slurm.commands import count_cores
from pybackend.core.machine import is_loopback, own_address, resolve
from pybackend.core.machine.capacity import list_gpus
from pybackend.core.model.compile_settings import describe_config
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.meeting_client import MeetingClient
from pybackend.core.net.rendezvous import listen, split_address
from pybackend.core.words import show

_LOOK_SECONDS = 0.1
_FIRST_NOTE_SECONDS = 2.0
# The first process has the same time limit, and reports which processes are missing.
_SLACK_SECONDS = 5.0
_DEVICES = "CUDA_VISIBLE_DEVICES"
# These may differ: only the first process writes files, and the rest concerns one process only.
_OWN = {"seed", "is_seeded", "model_uri", "tensorboard", "verbose", "timeout", "reports_steps"}
_OWN |= {"is_observed", "language"}
# Fields that are not arguments, and the argument from which they are derived.
_ARGUMENTS = {"batches": "data", "model_source": "model", "in_memory": "data_options"}
_ROWS = "rows of "
_FILES = "files of "


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


class CallGroup:
    """The processes in a call, as a `Group`.

    ``meet`` sends a message to all processes, and returns the messages of all, by rank.
    """

    def __init__(self, call: JoinedCall, meet: Callable[[str], Sequence[str]]) -> None:
        self._call, self._meet = call, meet
        self.error: Exception | None = None
        self.job, self.rank = call.member.job, call.place.rank
        self.hosts = list(map(split_host, call.place.peers))
        share = find_share(call.place, self.job.resources)
        self.cores, self.gpus, self._shortage = share.cores, share.gpus, share.shortage

    def gather(self, message: str) -> list[str]:
        """Gather the messages; store errors in ``error``, as they do not concern the worker."""
        try:
            own = encode(Claimed(message, self._call.claims, self._shortage))
            texts = self._meet(own)
            names = [self._call.place.name(rank) for rank in range(len(texts))]
            pairs = zip(texts, names, strict=True)
            everyone = [read_handshake(text, Claimed, name) for text, name in pairs]
            differs = find_disagreement(names, [claimed.claims for claimed in everyone])
            shortages = [claimed.shortage for claimed in everyone if claimed.shortage]
            if differs is not None or shortages:
                raise InputError(differs or shortages[0])
        except (ClusterError, InputError) as error:
            self.error = error
            raise ClusterError(str(error)) from error
        seed = read_handshake(everyone[0].message, Arrival, names[0]).seed
        self.job = replace(self.job, seed=self.job.seed if seed is None else seed)
        return [claimed.message for claimed in everyone]


class Reminder:
    """Reminder, at increasing intervals, of what this process is waiting for."""

    def __init__(self, call: JoinedCall) -> None:
        self._call = call
        self._began = time.monotonic()
        self._pause = _FIRST_NOTE_SECONDS

    def look(self, what: str) -> None:
        waited = time.monotonic() - self._began
        if waited > self._pause:
            self._pause *= 4
            self._call.emit(Note(f"waiting for {what}, for {waited:.0f} s so far"))


def meet_others(call: JoinedCall, server: MeetingServer, message: str) -> Sequence[str]:
    """Meet the others, which connect to this process, the first one."""
    place, limit = call.place, call.member.job.timeout
    server.join(0, message)
    reminder = Reminder(call)

    deadline, reason = time.monotonic() + limit, ""
    while time.monotonic() < deadline and not reason:
        if (everyone := server.wait_for_all(_LOOK_SECONDS)) is not None:
            return everyone
        missing = server.missing()[0]
        if left := ", ".join(place.name(rank) for rank in missing if server.has_left(rank)):
            reason = f"{left} connected, then ended: see what it printed"
        reminder.look(", ".join(map(place.name, missing)))
    rejected = server.rejected()
    found = f" ({rejected} connections had the wrong secret)" if rejected else ""
    reason = reason or (
        f"{', '.join(map(place.name, server.missing()[0]))} did not connect within {limit:g} s. "
        f"All {place.size} processes must make this call, and reach {place.meeting}{found}; "
        "`timeout` sets how long each waits"
    )
    server.refuse(reason)
    raise ClusterError(reason)


def meet_first(call: JoinedCall, client: MeetingClient, message: str) -> Sequence[str]:
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

    if (everyone := client.gather(message, look)) is None:
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
        f"{place.name(0)} did not respond at {place.meeting} within {call.member.job.timeout:g} s "
        f"({error}). Start the same script there; `timeout` sets how long each process waits"
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
    return join_address(_reachable(host, place), port)


def _reachable(host: str, place: Place) -> str:
    """Resolve a name to an address that others can reach; Debian maps its own name to loopback."""
    if not (known := resolve(host)):
        return host  # `listen` reports the error
    if not is_loopback(known[0]) or place.is_one_machine:
        return known[0]
    others = [peer for rank, peer in enumerate(place.peers) if rank != place.rank]
    routes = (own_address(split_host(other)) for other in [place.meeting, *others])
    return next((route for route in routes if route and not is_loopback(route)), known[0])


@dataclass(frozen=True)
class JoinedShare:
    """Cores and GPUs for a process's worker; its launcher may have divided the machine."""

    cores: int
    gpus: Sequence[str] | None  # None: they were not divided
    shortage: str | None  # a message if the machine has too few


def find_share(
    place: Place,
    resources: Resources,
    environment: Mapping[str, str] = os.environ,
    machine: Machine | None = None,
) -> JoinedShare:
    """``environment`` are the variables of the process; ``machine`` None: this one."""
    machine, size = machine or this_machine(), place.local_size
    own = share_of_machine(size, environment, resources, machine.gpus)[place.local_rank]
    cores = int(own["TF_NUM_INTRAOP_THREADS"])
    gpus = list_gpus(own) if _DEVICES in own else None
    if place.source == "srun":
        allotted = count_cores(environment)
        machine = replace(machine, cores=allotted * size)
        cores = resources.cpus or allotted
    # Slurm or a script launcher may have divided the GPUs.
    if _DEVICES in environment and (place.source == "srun" or "LOCAL_RANK" in environment):
        given = list_gpus(environment)
        machine = replace(machine, gpus=given * size)
        gpus = given[: resources.gpus]
    name = f"the machine of {place.name(place.rank)}"
    return JoinedShare(cores, gpus, find_shortage(resources, size, machine, name))


def describe_call(
    number: int, job: Job, files: Mapping[str, bytes], datasets: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the part of a call that must be equal in all processes, as plain data.

    ``number`` is the number of such calls in this process so far, including this one.
    """
    python = ".".join(map(str, sys.version_info[:2]))
    release = f"tfdist {pybackend.__version__}, Python {python}"
    claims: dict[str, Any] = {"release": release, "call": number, "kind": job.kind}
    for name in (field.name for field in fields(job) if field.name not in _OWN):
        claims[name] = json.loads(encode(getattr(job, name)))
    if isinstance(job, TrainingJob):
        claims["seed"] = job.seed if job.is_seeded else None
        claims["model_uri"] = None if job.model_uri is None else "a path"
    if MODEL_FILE in files:
        claims["structure"] = _digest_file(files[MODEL_FILE])
    # Functions are not compared: their code contains file names and more.
    claims["files"] = sorted(files)
    if EXTRAS in files:
        claims["callbacks"] = _describe_callbacks(files[EXTRAS])
    for name, columns in datasets.items():
        claims[_ROWS + argument_of(name)] = [count_rows(columns), describe_columns(columns)]
    for name in (name for name in files if name.endswith(SOURCE)):
        # Written by this process.
        source = cloudpickle.loads(files[name])
        if isinstance(source, FileRows):
            argument = argument_of(name.removesuffix(SOURCE))
            claims[_FILES + argument] = _describe_files(source)
    return claims


def find_disagreement(peers: Sequence[str], claims: Sequence[Mapping[str, Any]]) -> str | None:
    """Return a message about the first process that differs from process 0; None if all agree.

    ``peers`` are the names of the processes; ``claims`` are the results of `describe_call` in each,
    by rank.
    """
    wanted = claims[0]
    for rank, found in enumerate(claims):
        for name in {**wanted, **found}:
            if found.get(name) != wanted.get(name):
                return _explain(name, wanted.get(name), found.get(name), peers[0], peers[rank])
    return None


def describe_columns(columns: Mapping[str, Any]) -> dict[str, list[str]]:
    found = {}
    for name, column in columns.items():
        digest = hashlib.blake2b(digest_size=16)
        arrays = [column.values, column.lengths] if isinstance(column, Ragged) else [column]
        for array in arrays:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
        shape = "rows of different lengths" if isinstance(column, Ragged) else str(column.shape)
        found[name] = [f"{arrays[0].dtype} {shape}", digest.hexdigest()]
    return found


def _digest_file(content: bytes) -> str:
    with zipfile.ZipFile(BytesIO(content)) as archive:
        return digest_text(describe_config(json.loads(archive.read("config.json"))))


def _describe_callbacks(content: bytes) -> list[Any]:
    """Return the classes of the callbacks, and the numeric settings of Keras's own.

    Paths, and the state of custom callbacks, may differ.
    """
    found = []
    # Written by this process.
    for callback in cloudpickle.loads(content)["callbacks"]:
        kind = type(callback)
        settings = {
            name: value
            for name, value in vars(callback).items()
            if isinstance(value, (bool, int, float)) and not name.startswith("_")
        }
        is_of_keras = kind.__module__.partition(".")[0] == "keras"
        found.append([kind.__name__, json.dumps(settings, sort_keys=True) if is_of_keras else ""])
    return found


def _describe_files(source: FileRows) -> dict[str, Any]:
    """Return the names, numbers of rows and sizes of files, without reading their content."""
    columns, files = repr((source.column_groups, source.spec)), source.files
    rows = [
        [os.path.basename(path), int(rows), os.path.getsize(path) if os.path.exists(path) else 0]
        for path, rows in zip(files.files, files.counts, strict=True)
    ]
    return {"columns": columns, "schema": str(files.schema), "rows": rows}


def _explain(name: str, wanted: Any, found: Any, first: str, other: str) -> str:
    if name.startswith(_ROWS):
        return _explain_rows(name.removeprefix(_ROWS), wanted, found, first, other)
    if name.startswith(_FILES):
        return _explain_files(name.removeprefix(_FILES), wanted, found, first, other)
    if name == "files":
        wanted, found = (", ".join(names or ()) or "none" for names in (wanted, found))
    if name in _DIFFERENCES:
        return _DIFFERENCES[name].format(wanted=wanted, found=found, first=first, other=other)
    return (
        f"`{_ARGUMENTS.get(name, name)}` is {show(found)} in {other}, but {show(wanted)} in "
        f"{first}: all processes must make the same call"
    )


# By the name of what differs, in the first process and in another one.
_DIFFERENCES = {
    "call": "{other} is at call number {found}, but {first} is at call number {wanted}: restart "
    "all processes: they must make the same calls in the same order",
    "release": "{other} has {found}, {first} has {wanted}: install the same release on all "
    "machines",
    "structure": "the model of {other} differs from that of {first} in its structure, or in the "
    "arguments of compile(): build the same model in all processes",
    "callbacks": "`callbacks` of {other} and of {first} differ in their classes or settings: pass "
    "the same callbacks in all processes",
    "files": "{other} passes {found}, {first} passes {wanted}: pass the same kind of model, data "
    "and callbacks in all processes",
}


def _explain_rows(argument: str, wanted: Any, found: Any, first: str, other: str) -> str:
    advice = (
        "pass all rows in every process, which trains on its share; if each machine has its own "
        "rows, pass a function that returns a tf.data.Dataset"
    )
    if wanted is None or found is None:
        return f"{_explain_absence(f'`{argument}` as arrays', wanted, first, other)}: {advice}"
    if wanted[0] != found[0]:
        what = f"`{argument}` has {found[0]} rows in {other}, but {wanted[0]} in {first}"
        return f"{what}: {advice}"
    return _explain_columns(argument, wanted[1], found[1], first, other)


def _explain_absence(what: str, wanted: Any, first: str, other: str) -> str:
    who, whom = (other, first) if wanted is None else (first, other)
    return f"{who} passes {what}, {whom} does not"


def _explain_columns(argument: str, wanted: Any, found: Any, first: str, other: str) -> str:
    name = next(key for key in {**wanted, **found} if found.get(key) != wanted.get(key))
    kinds = [given[name][0] if name in given else "absent" for given in (found, wanted)]
    where = f"`{name}` of `{argument}`"
    if kinds[0] != kinds[1]:
        what = f"{where} is {kinds[0]} in {other}, but {kinds[1]} in {first}"
        return f"{what}: give it the same type and shape in all processes"
    return (
        f"{where} has different values in {other} than in {first}: pass the same rows in the same "
        "order in every process, which trains on its share"
    )


def _explain_files(argument: str, wanted: Any, found: Any, first: str, other: str) -> str:
    if wanted is None or found is None:
        what = _explain_absence(f"`{argument}` as files", wanted, first, other)
    elif wanted["rows"] != found["rows"]:
        what = f"the files `{argument}` of {other} and of {first} are not the same"
    else:
        return (
            f"{other} reads different columns of the files `{argument}` than {first}: pass the "
            "same `features`, `label`, `weight` and `data_options` in all processes"
        )
    return f"{what}: pass the same files in all processes; each trains on its share of the rows"
