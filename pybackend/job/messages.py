"""What the processes of a job send each other, apart from the job itself and the reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from pybackend.errors import Failure
from pybackend.job.codec import decode


@dataclass(frozen=True)
class EpochEnded:
    """An epoch has ended, the ``epoch``-th of at most ``epochs``.

    ``logs`` are Keras's figures over all rows, ``seconds`` the wall time. The launcher sets
    ``rank``, here and in all events, and the ``host`` where there is one.
    """

    epoch: int
    epochs: int
    seconds: float
    logs: Mapping[str, Any]
    rank: int = 0
    host: str = ""


@dataclass(frozen=True)
class StepEnded:
    """A step has ended, the ``step``-th of ``steps`` in an epoch: some of all steps are reported.

    Attributes
    ----------
    rows
        Of all workers in this epoch so far; of a pipeline, as many as if all had this worker's.
    seconds
        Since the epoch began.
    logs
        Keras's figures over this worker's rows of the epoch so far.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    rows: int
    seconds: float
    logs: Mapping[str, Any]
    rank: int = 0
    host: str = ""


@dataclass(frozen=True)
class Note:
    """Something that the user should know, and that all ranks say alike."""

    text: str
    rank: int = 0
    host: str = ""


@dataclass(frozen=True)
class Waits:
    """A worker has waited for the worker of rank ``peer`` for some seconds.

    It says so twice: by the second time, all that wait have spoken.
    """

    peer: int
    seconds: float
    is_second: bool
    rank: int = 0
    host: str = ""


@dataclass(frozen=True)
class PrintedLine:
    """A line that a worker has printed."""

    text: str
    rank: int = 0
    host: str = ""


@dataclass(frozen=True)
class Announced:
    """Something of a worker's that others may reach, by a name that they know; not printed."""

    name: str
    text: str
    rank: int = 0


@dataclass(frozen=True)
class Begun:
    """An asynchronous training has begun: from now on, workers may be lost."""

    rank: int = 0


@dataclass(frozen=True)
class Failed:
    """A worker has failed."""

    failure: Failure
    rank: int = 0


@dataclass(frozen=True)
class Reported:
    """A worker's report lies in its folder; a launcher does not pass this on."""

    rank: int = 0


@dataclass(frozen=True)
class Standby:
    """A worker of an elastic training waits for the order that makes it a member of a new gang.

    Attributes
    ----------
    address
        ``host:port`` at which it accepts the others from now on.
    orders
        How many orders it has had so far.
    epoch
        The epoch whose beginning it can go back to, from 0; None of one that has trained none.
    reason
        How it lost the others; empty if it was not by a loss.
    """

    address: str
    orders: int
    epoch: int | None = None
    reason: str = ""
    rank: int = 0


@dataclass(frozen=True)
class Resumed:
    """A training goes on from the checkpoint of a place, e.g. ``"epoch 2, step 5"``."""

    place: str
    rank: int = 0


@dataclass(frozen=True)
class EventBytes:
    """What has been added to one of TensorBoard's files.

    Attributes
    ----------
    name
        Of the file, relative to TensorBoard's folder, with slashes.
    start
        The byte with which ``data`` begins.
    data
        As base64 text.
    is_last
        Whether all files are complete with it.
    """

    name: str
    start: int
    data: str = field(repr=False)
    is_last: bool = False
    rank: int = 0


Event = (
    EpochEnded
    | StepEnded
    | Note
    | Waits
    | PrintedLine
    | Announced
    | Begun
    | Failed
    | Reported
    | Standby
    | Resumed
    | EventBytes
)
# What it returns is an `Answer` for the worker whose event it was, or of no meaning.
Emit = Callable[[Event], object]


@dataclass(frozen=True)
class Order:
    """What a worker could not know before all had been started.

    Attributes
    ----------
    token
        The job's secret, which every connection between workers proves.
    peers
        ``host:port`` at which each rank accepts the others.
    reserved
        ``host:port`` held for each rank's TensorFlow server; empty if the job needs none.
    counts
        Rows of each rank, by data set, of those that lie in the workers' folders.
    seed
        In place of the job's, of which members that nobody has sent a job each have their own.
    rank
        The worker's own, in place of the one that it was started with; for an elastic training.
    epoch
        Back to whose beginning the workers go, from 0; None: the training begins.
    """

    token: str = field(repr=False)
    peers: tuple[str, ...]
    reserved: tuple[str, ...] = ()
    counts: Mapping[str, list[int]] = field(default_factory=dict)
    seed: int | None = None
    rank: int | None = None
    epoch: int | None = None


@dataclass(frozen=True)
class Regroup:
    """A worker waits to join: all are to stand by at the end of the epoch."""


@dataclass(frozen=True)
class GoOn:
    """Whoever observes the training has heard of an epoch's end, and has nothing against more."""

    epoch: int


@dataclass(frozen=True)
class StopTraining:
    """Whoever observes the training wants it to stop, on all ranks after the same step."""


Answer = GoOn | StopTraining
FromLauncher = Order | Regroup | GoOn | StopTraining


@dataclass(frozen=True)
class Arrival:
    """What each member of a gang says when it meets the others.

    Attributes
    ----------
    address, reserved
        As in `Order`.
    host
        The member's host.
    packages
        What `pybackend.job.packages.read_versions` found there.
    layouts
        What `pybackend.data.layout.read_layouts` found in the worker's folder.
    has_failed
        Whether the member could not read its rows; then no worker starts.
    nonce
        Random text: connections between the workers prove a token that was made of all of these.
    seed
        The seed of the member's job.
    """

    address: str
    host: str
    packages: Mapping[str, Any]
    layouts: Mapping[str, Any]
    reserved: str | None = None
    has_failed: bool = False
    nonce: str = ""
    seed: int | None = None


@dataclass(frozen=True)
class Share:
    """What a worker gives to a gathering, by the name of the call that it makes."""

    call: str
    text: str


@dataclass(frozen=True)
class Shared:
    """What all workers have given, by rank."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class NotShared:
    """Why a gathering has failed; ``lost`` is the rank of a worker that was lost, if one was."""

    reason: str
    lost: int | None = None


@dataclass(frozen=True)
class Returned:
    """The worker's function has returned."""


@dataclass(frozen=True)
class End:
    """All others have returned, so a server is to end."""


FromHub = Shared | NotShared | End
FromSpoke = Share | Returned


def answer_of(on_event: Emit, event: Event) -> Answer | None:
    """Pass an event on; the answer to it, if there is one."""
    answer = on_event(event)
    return answer if isinstance(answer, Answer) else None


def sent_by(event: Event, rank: int, host: str) -> Event:
    """The event with its worker's rank, and host if it has a field for it."""
    if isinstance(event, EpochEnded | StepEnded | Note | Waits | PrintedLine):
        return replace(event, rank=rank, host=host)
    return replace(event, rank=rank)


def read_event(text: str | bytes) -> Event:
    """The event that `encode` wrote; `ValueError` as in `decode`."""
    event: Event = decode(text, *get_args(Event))
    return event
