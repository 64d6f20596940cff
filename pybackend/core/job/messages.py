"""Messages between the processes of a job, except for the job and the reports."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, count
from typing import Any, get_args

from pybackend.core.errors import Failure, Moment
from pybackend.core.job.codec import decode
from pybackend.core.job.report import Generation


@dataclass(frozen=True, kw_only=True)
class FromWorker:
    """Event from a worker, whose ``rank`` the launcher sets.

    In elastic training, it is the number of the worker, which it keeps when ranks change.
    """

    rank: int = 0


@dataclass(frozen=True, kw_only=True)
class FromHost(FromWorker):
    """Event from a worker whose ``host`` the launcher sets, too."""

    host: str = ""


@dataclass(frozen=True)
class EpochEnded(FromHost):
    """Event: an epoch ended, the ``epoch``-th of at most ``epochs``.

    ``logs`` are Keras's metrics over all rows, ``seconds`` is the wall time.
    """

    epoch: int
    epochs: int
    seconds: float
    logs: Mapping[str, Any]


@dataclass(frozen=True)
class StepEnded(FromHost):
    """Event: a step ended, the ``step``-th of ``steps`` in an epoch. Only some steps are reported.

    Attributes
    ----------
    rows
        Number of rows over all workers in this epoch so far; for a pipeline, estimated from this
        worker's rows.
    seconds
        Seconds since the epoch began.
    logs
        Keras's metrics over this worker's rows in the epoch so far.
    """

    epoch: int
    epochs: int
    step: int
    steps: int
    rows: int
    seconds: float
    logs: Mapping[str, Any]


@dataclass(frozen=True)
class Note(FromHost):
    """Note for the user, the same on all ranks."""

    text: str


@dataclass(frozen=True)
class Waits(FromHost):
    """Event: a worker has waited for the worker with rank ``peer`` for several seconds.

    It is sent twice. By the second time, all waiting workers have sent it once.
    """

    peer: int
    seconds: float
    is_second: bool


@dataclass(frozen=True)
class Phase(FromWorker):
    """Event: a worker began a phase of its start, such as ``"importing TensorFlow"``.

    `Phases` sends it again, with ``lasts``, if the phase takes more than an instant.
    """

    name: str
    lasts: bool = False


@dataclass(frozen=True)
class PrintedLine(FromHost):
    """Line that a worker printed."""

    text: str


@dataclass(frozen=True)
class Announced(FromWorker):
    """Information from a worker for the driver's listeners, under an agreed name; not printed."""

    name: str
    text: str


@dataclass(frozen=True)
class Begun(FromWorker):
    """Event: asynchronous training has begun. From now on, workers may be lost."""


@dataclass(frozen=True)
class Failed(FromWorker):
    """Event: a worker failed."""

    failure: Failure


@dataclass(frozen=True)
class Reported(FromWorker):
    """Event: a worker's report is in its folder. Launchers do not pass this on."""


@dataclass(frozen=True)
class Standby(FromWorker):
    """Event: a worker in elastic training is waiting for the `Order` to join a new generation.

    Attributes
    ----------
    address
        ``host:port`` at which it accepts connections from the others from now on.
    orders
        Number of `Order` messages that it has received so far.
    epoch
        Epoch to which it can return, from 0; None if it has not trained any.
    groups
        Where it can return to in that epoch: the workers of each group that trained it so far, and
        the steps that the group took. Empty: the beginning.
    reason
        How it lost the others; empty if no worker was lost.
    """

    address: str
    orders: int
    epoch: int | None = None
    groups: tuple[tuple[int, int], ...] = ()
    reason: str = ""


@dataclass(frozen=True)
class Resumed(FromWorker):
    """Event: training resumed from the checkpoint at this point, e.g. ``"epoch 2, step 5"``.

    ``generations`` has those of an elastic training run, from its beginning.
    """

    place: str
    generations: tuple[Generation, ...] = ()


@dataclass(frozen=True)
class EventBytes(FromWorker):
    """Bytes that were added to one of TensorBoard's files.

    Attributes
    ----------
    name
        Name of the file, relative to TensorBoard's folder, with slashes.
    start
        Offset of the first byte of ``data`` in the file.
    data
        The bytes as base64 text.
    is_last
        Whether all files are now complete.
    """

    name: str
    start: int
    data: str = field(repr=False)
    is_last: bool = False


_Seen = EpochEnded | StepEnded | Note | Waits | Phase | PrintedLine | Announced | Moment
_Change = Begun | Failed | Reported | Standby | Resumed | EventBytes
Event = _Seen | _Change
# It may return an `Answer` for the worker that sent the event; other values are ignored.
Emit = Callable[[Event], object]


@dataclass(frozen=True)
class Order:
    """Settings of a worker that are known only once all workers have started.

    Attributes
    ----------
    token
        The job's secret, which proves the identity of both ends of each connection.
    peers
        ``host:port`` at which each rank accepts connections from the others.
    reserved
        ``host:port`` reserved for each rank's TensorFlow server; empty if the job needs none.
    counts
        Number of rows on each rank, by data set, if the rows are in the workers' folders.
    seed
        Replaces the seed of the job. Processes that you start yourself each draw their own.
    rank
        In elastic training, replaces the rank that the worker was started with.
    epoch
        Epoch to which the workers return, from 0; None: the training begins.
    groups
        Where they return to in that epoch, as in `Standby`.
    generations
        In elastic training, those so far, including the one that this order forms.
    """

    token: str = field(repr=False)
    peers: tuple[str, ...]
    reserved: tuple[str, ...] = ()
    counts: Mapping[str, list[int]] = field(default_factory=dict)
    seed: int | None = None
    rank: int | None = None
    epoch: int | None = None
    groups: tuple[tuple[int, int], ...] = ()
    generations: tuple[Generation, ...] = ()


@dataclass(frozen=True)
class Regroup:
    """Request to wait for an `Order` at the end of the epoch, because a worker is joining."""


@dataclass(frozen=True)
class GoOn:
    """Answer from the observers at the end of an epoch: training continues."""

    epoch: int


@dataclass(frozen=True)
class StopTraining:
    """Answer from the observers: stop training on all ranks after the same step."""


@dataclass(frozen=True)
class Deliver:
    """Request to send a signal to the process of a rank, which `tfdist run` has started."""

    signal: int


Answer = GoOn | StopTraining
FromLauncher = Order | Regroup | GoOn | StopTraining | Deliver


@dataclass(frozen=True)
class Arrival:
    """First message from each process in a worker group to the others.

    Attributes
    ----------
    address, reserved
        As in `Order`.
    host
        Host of the process.
    packages
        Result of `pybackend.core.machine.packages.read_versions` there.
    layouts
        Result of `pybackend.core.data.row_store.read_layouts` for the worker's folder.
    has_failed
        Whether the process failed to read its rows; then no worker starts.
    nonce
        Random text: the workers authenticate with a token that is derived from the texts of all
        processes.
    seed
        Seed of the process's job.
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
    """Contribution of one worker to a gather call, with the name of the call."""

    call: str
    text: str


@dataclass(frozen=True)
class Shared:
    """Contributions of all workers, by rank."""

    texts: tuple[str, ...]


@dataclass(frozen=True)
class NotShared:
    """Reason why a gather call failed; ``lost`` is the rank of a lost worker, if any."""

    reason: str
    lost: int | None = None


@dataclass(frozen=True)
class Returned:
    """Event: the worker's function returned."""


@dataclass(frozen=True)
class End:
    """Request that a server end, because all others have returned."""


FromRoot = Shared | NotShared | End
FromPeer = Share | Returned


def answer_of(on_event: Emit, event: Event) -> Answer | None:
    """Pass an event on, and return the answer to it, if there is one."""
    answer = on_event(event)
    return answer if isinstance(answer, Answer) else None


def sent_by(event: Event, rank: int, host: str) -> Event:
    """Return the event with its worker's rank, and its host if there is a field for it."""
    if isinstance(event, FromHost | Moment):
        return replace(event, rank=rank, host=host)
    return replace(event, rank=rank)


def read_event(text: str | bytes) -> Event:
    """Read an event from its JSON; raise `ValueError` as `decode` does."""
    event: Event = decode(text, *get_args(Event))
    return event


class Phases:
    """Pass events on, and a `Phase` again, at growing intervals, as long as it lasts.

    ``seconds`` are the times after its beginning; from the last two on, it is repeated regularly.
    """

    def __init__(self, emit: Emit, seconds: Sequence[float] = (2.0, 10.0, 60.0, 300.0)) -> None:
        self._emit = emit
        self._times = seconds
        self._lock = threading.Lock()
        self._timer: threading.Timer | None = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, Phase | StepEnded | EpochEnded | Failed | Reported):
            self.end()
        if isinstance(event, Phase):
            with self._lock:
                self._wait(event, self._list_times(), 0.0)
        self._emit(event)

    def _list_times(self) -> Iterator[float]:
        *_, before, last = self._times
        return chain(self._times, count(2 * last - before, last - before))

    def end(self) -> None:
        with self._lock:
            if self._timer is not None:
                # Else each call of a session left a thread behind for up to five minutes.
                self._timer.cancel()
                self._timer = None

    def _wait(self, phase: Phase, times: Iterator[float], elapsed: float) -> None:
        end = next(times)
        self._timer = threading.Timer(end - elapsed, self._repeat, [phase, times, elapsed, end])
        self._timer.daemon = True
        self._timer.start()

    def _repeat(self, phase: Phase, times: Iterator[float], before: float, elapsed: float) -> None:
        with self._lock:
            if self._timer is not threading.current_thread():  # the phase has just ended
                return
            name = f"{phase.name} (for {elapsed:.0f} s)" if before else phase.name
            self._emit(replace(phase, name=name, lasts=True))
            if self._timer is threading.current_thread():
                self._wait(phase, times, elapsed)


class Answers:
    """Answers to a worker's events, received by one thread and used by another."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.is_stop = False
        self._epoch = 0

    def take(self, answer: Answer) -> None:
        with self._changed:
            if isinstance(answer, GoOn):
                self._epoch = answer.epoch
            self.is_stop |= isinstance(answer, StopTraining)
            self._changed.notify_all()

    def forget_epochs(self) -> None:
        """Discard the answers for past epochs, because elastic training repeats some epochs."""
        with self._changed:
            self._epoch = 0

    def wait_for_epoch(self, epoch: int) -> bool:
        """Wait for the answer at the end of an epoch; return whether training stops."""
        # Without a time limit: an observer may draw a plot, or prompt the user. If the session
        # ends, this process ends, too.
        with self._changed:
            self._changed.wait_for(lambda: self.is_stop or self._epoch >= epoch)
        return self.is_stop
