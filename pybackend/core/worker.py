"""One worker process: ``python -m pybackend.core.worker FOLDER LISTENING_FD EVENTS_FD``.

The launcher on the same host gives it a folder with its job, a socket that already listens, and a
pipe for events. When all peers are known, the launcher sends one line of JSON on standard input.
This pipe stays open as a lifeline: when it closes, the launcher has exited, and the worker ends
itself and all processes that it started.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import gc
import os
import queue
import re
import shutil
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, get_args

from pybackend.core import errors
from pybackend.core.errors import InputError, RError, SerializationError
from pybackend.core.job import messages
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.job import FunctionJob, Job, ModelJob, TrainingJob
from pybackend.core.job.messages import Answers, Emit, Note, Order, Phase
from pybackend.core.job.notice import RESTARTS, PreemptedError
from pybackend.core.job.report import WorkerReport
from pybackend.core.quiet import uncollected
from pybackend.core.words import setting, show, speak

if TYPE_CHECKING:
    from pybackend.core.collective import Collective
    from pybackend.core.data.reading import Sources
    from pybackend.core.engine.train import Training

Kind = TypeVar("Kind", bound=Job)

_OPEN_SERVERS = (
    "TensorFlow's own servers (of the transport 'tf' and parameter servers) listen "
    "on all interfaces of the workers' hosts, and accept every connection, without a token: use "
    "them only on networks that you trust"
)
_GPU_IS_FULL = (
    "other processes use the memory of this GPU (`nvidia-smi` lists them): if your session is one "
    "of them, set TF_FORCE_GPU_ALLOW_GROWTH=true before it imports Keras"
)
_KEEP_FOLDER = "set TMPDIR to a folder from which no cleaner of temporary files deletes"
_DISK_IS_FULL = (
    "a disk is full: free up space at the path in the traceback, or set TMPDIR to a folder on a "
    "larger disk"
)
_ADVICE = {
    SerializationError: "see the message",
    RError: "fix the R function, or what the message refers to, then start again",
    InputError: "",  # its message has the advice
}
REPORT = "report.json"
JOB = "job.json"
_CLEARINGS = 100
_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> int:
    folder = Path(arguments[0])
    server = socket.socket(fileno=int(arguments[1]))
    events = os.fdopen(int(arguments[2]), "w", buffering=1)
    inbox = queue.Queue[Order](), threading.Event(), Answers()
    wake_when_orphaned()
    lifeline = (_own_stdin(), folder, *inbox)
    threading.Thread(target=_lifeline, args=lifeline, daemon=True).start()

    emit = messages.Phases(lambda event: events.write(encode(event) + "\n"))
    rank = int(os.environ["TFDIST_WORKER"])  # for life; `TFDIST_RANK` may change
    host, at_end = os.environ["TFDIST_HOST"], contextlib.ExitStack()
    conclude = _Conclusion(folder, events, emit, at_end)
    try:
        job = Job.from_json((folder / JOB).read_text())
        speak(job.language)
        worker = WorkerProcess(job, rank, host, folder, server, *inbox, emit, at_end, conclude)
        report = _work(worker)
    except BaseException as error:
        report = WorkerReport(rank, host, os.getpid(), failure=_failure(rank, host, error))
    conclude(report)
    return 0 if report.ok else 1


@dataclass
class _Conclusion:
    """Publish the worker's first report, from any thread, and ignore later ones."""

    _folder: Path
    _events: IO[str]
    _emit: Emit
    _at_end: contextlib.ExitStack
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _is_over: bool = False

    def __call__(self, report: WorkerReport) -> None:
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            try:
                if report.ok:  # once the report exists, the launcher may end this process
                    self._at_end.close()
                _publish(report, self._folder)
                self._emit(messages.Reported())
                self._events.close()
            except OSError as error:
                # The disk is full, or the launcher exited. If this process ended here, the lifeline
                # could not delete the folder.
                with contextlib.suppress(OSError):
                    failure = _failure(report.rank, report.host, error)
                    self._emit(messages.Failed(report.failure or failure))


@dataclass(frozen=True)
class WorkerProcess(Generic[Kind]):
    """Rank and host of this worker, and the objects that it shares with its launcher."""

    job: Kind
    rank: int
    host: str
    folder: Path
    server: socket.socket
    orders: queue.Queue[Order]
    asked: threading.Event  # set while another worker waits to join
    answers: Answers  # from the observers of the training
    emit: Emit
    at_end: contextlib.ExitStack  # closed right before the report is written, if nothing failed
    conclude: Callable[[WorkerReport], object]  # publishes the report before `main` does

    def report(self, **found: Any) -> WorkerReport:
        return WorkerReport(self.rank, self.host, os.getpid(), **found)

    def receive(self) -> tuple[WorkerProcess[Kind], Order]:
        """Wait for the `Order`, and take the seed from it."""
        order = self.orders.get()
        seed = self.job.seed if order.seed is None else order.seed
        return replace(self, job=replace(self.job, seed=seed)), order

    @contextlib.contextmanager
    def join(self, order: Order, has_read: bool) -> Iterator[Collective]:
        """Return the collective of all workers in the `Order`, which may read data first."""
        from pybackend.core.collective import LONGEST_SECONDS, Alone, Patience, join_mesh

        collective: Collective = Alone()
        if self.job.workers > 1:
            self.emit(Phase("connecting to the other workers"))
            job, timeout = self.job, self.job.timeout
            given = self.server, order.peers, self.rank, order.token, timeout
            collective = join_mesh(
                *given,
                connect_timeout=max(timeout, LONGEST_SECONDS) if has_read else timeout,
                patience=Patience(on_wait=lambda *wait: self.emit(messages.Waits(*wait))),
                encrypt=job.encrypt,
                shares_memory=job.shares_memory,
            )
        with contextlib.closing(collective):
            yield collective


def _work(worker: WorkerProcess[Any]) -> WorkerReport:
    if isinstance(worker.job, FunctionJob):
        return _run(worker)
    worker.emit(Phase("importing TensorFlow"))
    # The import takes seconds, while the launcher collects the peers' addresses.
    with uncollected():
        import keras  # noqa: F401
    gc.freeze()  # these objects live as long as the process
    if worker.job.workers > 1:
        worker.emit(Phase("waiting for the other workers"))
    return _train(worker) if isinstance(worker.job, TrainingJob) else _score(worker)


def _train(worker: WorkerProcess[TrainingJob]) -> WorkerReport:
    from pybackend.core.engine.train import train

    if worker.job.is_elastic:
        return _train_elastically(worker)
    worker, order = worker.receive()
    if worker.job.is_asynchronous:
        return _train_with_parameter_servers(worker, order)
    sources, sent = _read_own(worker, order)
    with worker.join(order, bool(sources)) as collective:
        if worker.job.needs_tensorflow_server:
            from pybackend.core.collective.tensorflow import start_runtime

            worker.emit(Note(_OPEN_SERVERS))
            start_runtime(order.reserved, worker.rank, worker.job.timeout)
        counts = {**order.counts, **sources.settle(worker.job, collective, worker.folder)}
        given = worker.job, collective, counts, worker.folder, worker.emit
        trained = train(*given, stream=sources.stream, answers=worker.answers, sent=sent)
    return _report_training(worker, trained)


def _read_own(worker: WorkerProcess[Any], order: Order) -> tuple[Sources, dict[str, Any]]:
    """Read the data that workers read themselves; also return what the driver pickled."""
    from pybackend.core.data.reading import read_sources
    from pybackend.core.model.transfer import unpickle_sent

    worker.emit(Phase("reading the data"))
    sent = unpickle_sent(worker.job, worker.folder)
    functions = sent.pop("functions", {})  # not retained, because they may hold many rows
    return read_sources(worker.job, worker.rank, worker.folder, order, functions), sent


def _train_elastically(worker: WorkerProcess[TrainingJob]) -> WorkerReport:
    from pybackend.core.engine.elastic.generations import Membership, train_in_generations

    def join(job: TrainingJob, rank: int, order: Order, server: socket.socket) -> Any:
        return replace(worker, job=job, rank=rank, server=server).join(order, False)

    def wait() -> Order:
        order = worker.orders.get()
        # Callbacks ask for it. When it was the number of the worker for life, what they did "on
        # rank 0" stopped silently once worker 0 was lost.
        os.environ["TFDIST_RANK"] = str(order.rank)
        return order

    member, host, server = worker.rank, worker.host, worker.server
    membership = Membership(member, host, server, wait, worker.asked.is_set, join, worker.answers)
    trained = train_in_generations(worker.job, membership, worker.folder, worker.emit)
    return _report_training(worker, trained)


def _train_with_parameter_servers(worker: WorkerProcess[TrainingJob], order: Order) -> WorkerReport:
    from pybackend.core.parameter_server.process import train_with_parameter_servers

    if worker.rank == 0:
        worker.emit(Note(_OPEN_SERVERS))
    given = worker.job, worker.rank, worker.folder, worker.server, order, worker.emit
    end = partial(_end_server, worker)
    return _report_training(worker, train_with_parameter_servers(*given, end, worker.answers))


def _report_training(worker: WorkerProcess[TrainingJob], trained: Training) -> WorkerReport:
    if trained.discard is not None:
        worker.at_end.callback(trained.discard)
    found = {name: value for name, value in vars(trained).items() if name != "discard"}
    return worker.report(value=found.pop("history"), **found)


def _score(worker: WorkerProcess[ModelJob]) -> WorkerReport:
    from pybackend.core.engine.evaluation import score

    worker, order = worker.receive()
    sources, sent = _read_own(worker, order)
    with worker.join(order, bool(sources)) as collective:
        counts = {**order.counts, **sources.settle(worker.job, collective, worker.folder)}
        worker.emit(Phase("computing"))
        scored = score(worker.job, collective, counts, worker.folder, worker.emit, sent)
    return worker.report(rows=scored.rows, seconds=scored.seconds, value=scored.value)


def _run(worker: WorkerProcess[FunctionJob]) -> WorkerReport:
    from pybackend.core.function.call import Hooks, call_function
    from pybackend.core.job.value_codec import encode_value

    def announce(name: str, text: str) -> None:
        worker.emit(messages.Announced(name, text))

    order, end = worker.orders.get(), partial(_end_server, worker, value=encode_value(None))
    hooks = Hooks(end, announce, lambda text: worker.emit(Note(text)))
    given = worker.job, worker.rank, worker.folder, worker.server
    value, seconds = call_function(*given, order, hooks)
    return worker.report(seconds=seconds, value=value)


def _end_server(worker: WorkerProcess[Any], error: Exception | None, **found: Any) -> None:
    """Exit this process even though its function may never return, as in a parameter server."""
    if error is not None:
        found = {"failure": _failure(worker.rank, worker.host, error)}
    worker.conclude(worker.report(**found))
    _fall_silent()


def _own_stdin() -> IO[bytes]:
    """Return standard input, and replace it with an empty one for user code.

    A forked child closes `sys.stdin`, and would wait forever for the thread that reads it.
    """
    pipe = os.fdopen(os.dup(0), "rb")
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return pipe


def wake_when_orphaned() -> None:
    """Make the system resume this process, if it is stopped, when its parent process ends.

    Only a running process notices that its lifeline was closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


def _lifeline(
    pipe: IO[bytes],
    folder: Path,
    orders: queue.Queue[Order],
    asked: threading.Event,
    answers: Answers,
) -> None:
    """Forward the launcher's orders; when the pipe closes, clean up and kill the process group."""
    for line in pipe:
        message = decode(line, *get_args(messages.FromLauncher))
        if isinstance(message, messages.Regroup):
            asked.set()
        elif isinstance(message, messages.Answer):
            answers.take(message)
        else:
            asked.clear()
            orders.put(message)
    for _ in range(_CLEARINGS):  # other threads of this process may still write there
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            break
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _failure(rank: int, host: str, error: BaseException) -> errors.Failure:
    kind, message = _name(error), _message(error)
    if isinstance(error, PreemptedError):
        kind, message = error.describe(rank)
    what = kind, _shorten(message, 20_000), _shorten(_traceback(error), 60_000)
    return errors.Failure(rank, host, *what, time=time.time(), advice=_advice(error))


def _name(error: BaseException) -> str:
    # numpy raises a private subclass.
    return "MemoryError" if isinstance(error, MemoryError) else type(error).__name__


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as failed:  # in the code of its class
        return f"(no text: its __str__ raised {type(failed).__name__})"


def _message(error: BaseException) -> str:
    """Return the text of an error, without TensorFlow's list of node definitions."""
    text = _text(error)
    # TensorFlow's reason precedes the first name of a node.
    reasons = re.findall(r"^(.+)\n\s*\[\[\{\{node", text, re.MULTILINE)
    return reasons[0] if text.startswith("Graph execution error") and reasons else text


def _shorten(text: str, most: int) -> str:
    """Return the beginning and the end of a long text, so that it fits into one event."""
    half, more = most // 2, len(text) - most
    shown = f"{text[:half]}\n... {more} characters left out ...\n{text[-half:]}"
    return shown if more > 0 else text


def _traceback(error: BaseException) -> str:
    if isinstance(error, RError):  # Python's frames would not help
        return error.calls
    if isinstance(error, (InputError, PreemptedError)):  # its message is enough
        return ""
    return "".join(traceback.format_exception(type(error), error, _skip_ours(error.__traceback__)))


def _skip_ours(frames: TracebackType | None) -> TracebackType | None:
    """Return the frames, starting with the first one outside this package; all if there is none."""
    # As in the frames: code that was compiled elsewhere has the paths of that machine.
    ours = os.path.dirname(_skip_ours.__code__.co_filename)
    return errors.skip_frames(frames, (ours, "<frozen")) or frames


def _advice(error: BaseException) -> str:
    if isinstance(error, errors.PeerLostError):
        return "check the log of the lost worker, and the network between the two hosts"
    if isinstance(error, PreemptedError):
        return RESTARTS
    if isinstance(error, ModuleNotFoundError):
        return f"install {show(error.name)} for {sys.executable} on every host that runs workers"
    text = _text(error)
    if "cudaSetDevice" in text and "out of memory" in text:
        return _GPU_IS_FULL
    if "NCCL" in text:
        own = setting(transport="tf")
        return f"NCCL needs one GPU per worker: start fewer workers, or leave out {own}"
    # TensorFlow's error, for the memory of a GPU or of the machine.
    if isinstance(error, MemoryError) or _name(error) == "ResourceExhaustedError":
        return "memory ran out: lower batch_size, or give each worker more memory"
    if isinstance(error, errors.ClusterError):
        return "see the message"
    folder = os.environ.get("TMPDIR", "/")
    if not os.path.isdir(folder):  # most errors name a file that was in it, or not even that
        return f"the worker's folder, {folder}, was deleted while the worker ran: {_KEEP_FOLDER}"
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _DISK_IS_FULL
    if "label value" in text and not isinstance(error, tuple(_ADVICE)):
        return "encode the classes of the label as 0, 1, 2, ..., one code for each of the outputs"
    usual = "fix the error in the traceback, then start again"
    return next((text for kind, text in _ADVICE.items() if isinstance(error, kind)), usual)


def _publish(report: WorkerReport, folder: Path) -> None:
    # Renamed, because a launcher must never read a part of it.
    partial = folder / f"{REPORT}.partial"
    partial.write_text(encode(report))
    partial.replace(folder / REPORT)


def leave(status: int) -> NoReturn:
    """Close the output, and wait for the lifeline to end this process.

    The launcher reads the folder, then closes the lifeline. If this process exited earlier and the
    launcher was killed (as Spark does if another worker fails), nothing would delete the folder.
    """
    _fall_silent()
    while True:
        signal.pause()


def _fall_silent() -> None:
    """Close the pipe to the launcher, which reads it to the end."""
    sys.stdout.flush()
    sys.stderr.flush()
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 1)
        os.dup2(nothing.fileno(), 2)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
