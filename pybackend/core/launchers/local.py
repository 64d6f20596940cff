"""Workers as processes on this machine, which communicate over the loopback interface."""

from __future__ import annotations

import queue
import re
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

from pybackend.core.data.arrays import Columns, count_rows, shard
from pybackend.core.data.files import check_folder
from pybackend.core.data.row_store import link_columns, write_columns
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.job import Job, TrainingJob
from pybackend.core.job.messages import Emit, Event, Note, Order
from pybackend.core.job.notice import Notice, at_own_end
from pybackend.core.job.report import WorkerReport
from pybackend.core.job.worker_options import THIS
from pybackend.core.launchers.base import DataSets, Files, Outcome, Submission, reject_environment
from pybackend.core.launchers.child import Child, find_disk
from pybackend.core.launchers.crew import Crew, follow_child, take_all
from pybackend.core.launchers.elastic_workers import Said, train_elastically
from pybackend.core.launchers.fork_server import (
    forking_at_once,
    forking_workers,
    is_forking,
    start_fork_server,
    stop_fork_server,
)
from pybackend.core.launchers.joined.place import find_place
from pybackend.core.launchers.shares import find_shortage, share_of_machine, this_machine
from pybackend.core.machine.capacity import read_free_memory
from pybackend.core.machine.janitor import swept_folder
from pybackend.core.net.authentication import new_token
from pybackend.core.words import setting, show, show_bytes

HOST = "127.0.0.1"
# Least private memory of a process that has imported TensorFlow.
_TENSORFLOW_BYTES = 240 << 20


@dataclass(frozen=True)
class _Lane:
    """Part of this machine for one of several jobs at once, which share the rows that are written.

    ``shares`` holds the variables of its workers.
    """

    shares: list[dict[str, str]]
    rows: SharedRows


class LocalLauncher:
    """One process per worker on this machine; events arrive on the calling thread."""

    where = "processes of this machine"
    is_here = True
    session = None
    workers = None
    why_fixed = None

    def __init__(self, lane: _Lane | None = None) -> None:
        self._lane = lane

    def warm_up(self) -> None:
        start_fork_server()

    def check(self, job: Job) -> None:
        if job.resources.environment != THIS:
            reject_environment(
                job,
                "on this machine, workers have the environment of this session. Start the "
                "session in the other environment",
            )
        _check_machine(job)
        if not isinstance(job, TrainingJob):
            return
        if job.checkpoint is not None:
            check_folder(f"{job.checkpoint.uri.rstrip('/')}/checkpoint", "recovery")
        if job.model_uri is not None:
            check_folder(job.model_uri, "model_options")

    def describe(self, job: Job) -> Submission:
        self.check(job)
        return Submission(("this machine",) * job.workers)

    @contextmanager
    def divide(
        self, job: Job, most: int, parallelism: int | None
    ) -> Iterator[Sequence[LocalLauncher]]:
        workers = job.most_workers
        lanes = min(most, parallelism or _count_lanes(job))
        if shortage := find_shortage(job.resources, workers * lanes, this_machine()):
            raise InputError(f"{setting(parallelism=lanes)}: {shortage}")
        shares = share_of_machine(workers * lanes, resources=job.resources)
        with swept_folder(find_disk()) as folder:
            rows = SharedRows(folder)
            parts = [shares[first : first + workers] for first in range(0, len(shares), workers)]
            yield [LocalLauncher(_Lane(part, rows)) for part in parts]

    @forking_workers()
    def launch(self, job: Job, files: Files, datasets: DataSets, on_event: Emit) -> Outcome:
        self.check(job)
        _note_other_processes(on_event)
        if self._lane is None:
            shares = share_of_machine(job.most_workers, resources=job.resources)
        else:
            shares = self._lane.shares[: job.most_workers]
        if isinstance(job, TrainingJob) and job.is_elastic:
            with LocalSite(job, files, datasets, shares) as site:
                return train_elastically(job, datasets, on_event, site)
        ranks = range(job.workers)
        shards = {n: [shard(c, job.workers, rank) for rank in ranks] for n, c in datasets.items()}
        events: queue.Queue[Event | WorkerReport] = queue.Queue()
        with ExitStack() as stack:
            notice, children = Notice(), []
            for rank, variables in enumerate(shares):
                child = Child(job, rank, HOST, events.put, variables, notice=notice)
                children.append(stack.enter_context(child))
            # A process imports TensorFlow while the rows are written: each worker or, in the first
            # call, the fork server, which the start of a worker waits for.
            forks = is_forking()
            for child in [] if forks else children:
                child.start(files)
            for name, parts in shards.items():
                shares_all = name == "train" and job.shuffles_globally
                if self._lane is None:
                    _write(children, name, [datasets[name]] if shares_all else parts)
                else:
                    count = 1 if shares_all else job.workers
                    self._lane.rows.link(children, name, datasets[name], count)
            for child in children if forks else []:
                child.start(files)
            order = Order(
                token=new_token(),
                peers=tuple(child.address for child in children),
                reserved=tuple(child.reserved for child in children if child.reserved),
                counts={name: [count_rows(p) for p in parts] for name, parts in shards.items()},
            )
            for child in children:
                child.go(order)
            crew = Crew(job, on_event, lambda answer, rank: children[rank].go(answer), HOST)
            with notice.expected(job.keeps_checkpoints):
                for child in children:
                    follow_child(child, events.put)
                crew.follow(partial(take_all, events, crew.hear))
                reports = crew.conclude(partial(at_own_end, notice=notice))
            notice.pass_on()
            return Outcome(reports, children[0].model())


_has_noted = threading.Event()


def _note_other_processes(on_event: Emit) -> None:
    """Show once that each of several processes, as in `tfdist run`, starts its own workers."""
    try:
        place = find_place()
    except (ClusterError, InputError):  # of no concern on this machine alone
        return
    if place is None or place.rank > 0 or _has_noted.is_set():
        return
    _has_noted.set()
    text = (
        f"{show('local')} starts workers for this process only. This is one of {place.size} "
        f"processes ({place.source}), and each that makes this call does the whole work: to work "
        f"together, pass {show(None)} as the first argument"
    )
    on_event(Note(text))


def launcher_of(target: Any) -> LocalLauncher | None:
    """Return a launcher if ``target`` means this machine: None, ``"local"``, ``"local[N]"``."""
    is_text = isinstance(target, str) and re.fullmatch(r"local(\[(\d+|\*)\])?", target)
    return LocalLauncher() if target is None or is_text else None


def _check_machine(job: Job) -> None:
    machine, workers = this_machine(), job.most_workers
    if shortage := find_shortage(job.resources, workers, machine):
        raise InputError(shortage)
    if job.kind == "run" or workers * _TENSORFLOW_BYTES <= read_free_memory(swaps=True):
        return
    stop_fork_server()
    free = read_free_memory(swaps=True)
    if workers * _TENSORFLOW_BYTES > free:
        raise InputError(
            f"{workers} workers need more than {show_bytes(workers * _TENSORFLOW_BYTES)} of "
            f"memory for TensorFlow alone, but this machine has {show_bytes(free)} free "
            f"and {machine.cores} cores: start no more than about one worker per core"
        )


def _write(children: Sequence[Child], name: str, parts: Sequence[Columns]) -> None:
    """Write each child's part of a data set; if all share a part, write it once and link it."""
    folders = [child.folder / name for child in children]
    for folder, part in zip(folders, parts, strict=False):
        write_columns(folder, part)
    for folder in folders[len(parts) :]:
        link_columns(folder, folders[0])


class SharedRows:
    """Rows that are written once, on the disk of the workers' folders, for several jobs."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        # With the columns, so that no others get their identity.
        self._written: dict[tuple[int, int], tuple[Columns, list[Path]]] = {}

    def link(self, children: Sequence[Child], name: str, columns: Columns, parts: int) -> None:
        key = id(columns), parts
        with self._lock:
            if key not in self._written:
                self._written[key] = columns, self._write(columns, parts)
        for child, source in zip(children, cycle(self._written[key][1]), strict=False):
            link_columns(child.folder / name, source)

    def _write(self, columns: Columns, parts: int) -> list[Path]:
        root = Path(tempfile.mkdtemp(dir=self._folder))
        folders = [root / str(part) for part in range(parts)]
        for part, folder in enumerate(folders):
            write_columns(folder, shard(columns, parts, part))
        return folders


def _count_lanes(job: Job) -> int:
    """Return how many such jobs this machine has cores, memory and GPUs for; at least 1."""
    machine, wanted, workers = this_machine(), job.resources, job.most_workers
    most = [
        machine.cores // (wanted.cpus or 1),
        machine.memory // (wanted.bytes or 1),
        int(read_free_memory(swaps=True) // _TENSORFLOW_BYTES),
    ]
    if machine.usable_gpus and wanted.gpus != 0:
        most.append(len(machine.usable_gpus) // (wanted.gpus or 1))
    return max(1, min(most) // workers)


class LocalSite(ExitStack):
    """A `Site` whose workers are processes on this machine; a context manager, which stops them.

    ``shares`` has the variables for the worker in each slot.
    """

    def __init__(
        self, job: Job, files: Files, datasets: DataSets, shares: Sequence[Mapping[str, str]]
    ) -> None:
        super().__init__()
        self.places = len(shares)
        self._job, self._files, self._datasets, self._shares = job, files, datasets, shares
        self._children: list[Child] = []

    def start(self, number: int, place: int, say: Callable[[Said], None]) -> Child:
        child = self.enter_context(Child(self._job, number, HOST, say, self._shares[place]))
        # The rows are written once, and linked into the folders of the other workers.
        holder = next((c for c in self._children if not c.is_closed), None)
        # Once training has begun, the other workers get their orders from this thread.
        has_begun = number >= self._job.workers
        try:
            with forking_at_once() if has_begun else nullcontext():
                child.start(self._files)
            for name, columns in self._datasets.items():
                if holder is not None:
                    link_columns(child.folder / name, holder.folder / name)
                else:
                    write_columns(child.folder / name, columns)
        except BaseException:
            child.close()
            raise
        self._children.append(child)
        follow_child(child, say)
        return child
