"""Workers as processes of this machine, over the loopback interface."""

from __future__ import annotations

import os
import queue
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from pybackend.data.arrays import Columns, count_rows, shard
from pybackend.data.spool import link_columns, write_columns
from pybackend.errors import Failure
from pybackend.job.job import Job
from pybackend.job.messages import Emit, Event, Order
from pybackend.job.report import WorkerReport
from pybackend.launchers.base import Outcome
from pybackend.launchers.child import Child
from pybackend.launchers.failures import Failures
from pybackend.net.rendezvous import new_token
from pybackend.tf_config import check_single_process

HOST = "127.0.0.1"
# After the first failure: time for the others to say that they lost a peer.
_GRACE_SECONDS = 5.0


class LocalLauncher:
    """One process per worker on this machine; events arrive on the calling thread."""

    session = None

    def launch(
        self,
        job: Job,
        files: Mapping[str, bytes],
        datasets: Mapping[str, Columns],
        on_event: Emit,
    ) -> Outcome:
        """See `Launcher`."""
        shards = {
            name: [shard(columns, job.workers, rank) for rank in range(job.workers)]
            for name, columns in datasets.items()
        }
        events: queue.Queue[Event | WorkerReport] = queue.Queue()
        with ExitStack() as stack:
            children = []
            for rank, variables in enumerate(_share_of_machine(job.workers)):
                child = stack.enter_context(Child(job, rank, HOST, events.put, variables))
                # First the process, whose imports take seconds; its input is there when it asks.
                child.start(files)
                children.append(child)
            for name, parts in shards.items():
                shares_all = name == "train" and job.shuffle == "global"
                _write(children, name, [datasets[name]] if shares_all else parts)
            order = Order(
                token=new_token(),
                peers=tuple(child.address for child in children),
                reserved=tuple(child.reserved for child in children if child.reserved),
                counts={name: [count_rows(p) for p in parts] for name, parts in shards.items()},
            )
            for child in children:
                child.go(order)
            failures = Failures(on_event)
            reports = _watch(children, events, failures)
            failures.raise_any()
            return Outcome(reports, children[0].model())


def launcher_of(target: Any) -> LocalLauncher | None:
    """A launcher if ``target`` means this machine: None, ``"local"``, ``"local[N]"``."""
    if target is None:
        check_single_process()
    is_text = isinstance(target, str) and re.fullmatch(r"local(\[(\d+|\*)\])?", target)
    return LocalLauncher() if target is None or is_text else None


def _write(children: Sequence[Child], name: str, parts: Sequence[Columns]) -> None:
    """Write each child's part of a data set, or all of it once if all share it."""
    folders = [child.folder / name for child in children]
    for folder, part in zip(folders, parts, strict=False):
        write_columns(folder, part)
    for folder in folders[len(parts) :]:
        link_columns(folder, folders[0])


def _watch(
    children: Sequence[Child], events: queue.Queue[Event | WorkerReport], failures: Failures
) -> list[WorkerReport]:
    """Collect all reports; once one worker has failed, the others get a short grace."""
    reports: dict[int, WorkerReport] = {}

    def wait_for(child: Child) -> None:
        try:
            report = child.wait()
        except Exception as error:  # whatever it is, it must not leave the launcher waiting
            report = _fail(child, type(error).__name__, str(error))
        events.put(report)

    for child in children:
        threading.Thread(target=wait_for, args=(child,), daemon=True).start()
    deadline = float("inf")
    while len(reports) < len(children) and time.monotonic() < deadline:
        try:
            # A short wait, so that Ctrl-C is noticed by Python's main thread, and by R.
            event = events.get(timeout=0.1)
        except queue.Empty:
            continue
        if not isinstance(event, WorkerReport):
            failures(event)
            continue
        reports[event.rank] = event
        if not event.ok:
            deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
    stopped = "ended by the launcher because another worker had failed"
    ordered = [reports.get(c.rank) or _fail(c, "Stopped", stopped) for c in children]
    failures.add(report.failure for report in ordered if report.failure is not None)
    return ordered


def _fail(child: Child, exception_type: str, message: str) -> WorkerReport:
    failure = Failure(child.rank, child.host, exception_type, message, time=time.time())
    return WorkerReport(child.rank, child.host, child.pid, failure=failure)


def _gpus() -> list[str]:
    """Numbers of the NVIDIA GPUs that the system shows."""
    devices = sorted(Path("/dev").glob("nvidia[0-9]*"))
    return [device.name.removeprefix("nvidia") for device in devices]


def _share_of_machine(workers: int) -> list[dict[str, str]]:
    """Divide this machine's cores and GPUs among the workers, unless the user has done so."""
    cores = str(max(1, (os.cpu_count() or 1) // workers))
    shared = {
        name: os.environ.get(name, cores) for name in ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")
    }
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = chosen.split(",") if chosen else _gpus()
    if not gpus:
        return [shared] * workers
    return [{**shared, "CUDA_VISIBLE_DEVICES": gpus[rank % len(gpus)]} for rank in range(workers)]
