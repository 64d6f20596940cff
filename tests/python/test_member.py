"""A member of a worker group of any kind: here threads of one process that meet in memory."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cloudpickle import dumps
from threads import Threads

from pybackend.core.errors import ClusterError
from pybackend.core.job.job import FUNCTION, FunctionJob
from pybackend.core.job.messages import Event, PrintedLine
from pybackend.core.job.report import WorkerReport
from pybackend.core.job.value_codec import decode_value
from pybackend.core.job.worker_options import Resources
from pybackend.core.launchers.member import Member, RowSource
from pybackend.tfos.feed.dialog import FEED_TOKEN
from pybackend.tfos.feed.spark_task import StartMember

pytestmark = pytest.mark.launcher


class Memory:
    """Messages of all members, and a barrier."""

    def __init__(self, workers: int) -> None:
        self.messages = [""] * workers
        self.barrier = threading.Barrier(workers)


@dataclass(frozen=True)
class ThreadGroup:
    """One thread among others."""

    rank: int
    memory: Memory
    cores: int = 3
    gpus: tuple[str, ...] | None = ("7", "8")

    @property
    def hosts(self) -> list[str]:
        return ["localhost"] * len(self.memory.messages)

    def gather(self, message: str) -> list[str]:
        self.memory.messages[self.rank] = message
        self.memory.barrier.wait(timeout=30)
        return self.memory.messages


class Lost(ThreadGroup):
    def gather(self, message: str) -> list[str]:
        raise ClusterError("the others cannot be met")


class Garbled(ThreadGroup):
    def gather(self, message: str) -> list[str]:
        first, second = super().gather(message)
        return [first, second[:-9]]


def leave_half_a_report(context: Any) -> Any:
    import os

    folder = os.environ["TMPDIR"]
    with open(f"{folder}/half", "w") as file:
        file.write('{"__type__": "WorkerReport", "rank": 0, "ho')
    os.rename(f"{folder}/half", f"{folder}/report.json")
    os._exit(0)


def show(context: Any) -> Any:
    import os

    print("hello")
    return context.rank, os.environ["OMP_NUM_THREADS"], os.environ["CUDA_VISIBLE_DEVICES"]


def work(
    kind: type[ThreadGroup],
    events: list[Event],
    source: RowSource | None = None,
    resources: Resources | None = None,
    fn: Any = show,
) -> list[WorkerReport]:
    job = FunctionJob(2, reports_lines=True, resources=resources or Resources())
    member = Member(job, {FUNCTION: dumps((fn, ()))}, source, "token", None, loopback=False)
    memory = Memory(2)
    with Threads() as threads:
        groups = [kind(rank, memory) for rank in range(2)]
        found = threads.map(lambda group: member.work(group, [], events.append), groups)
        return [report for report, _ in found]


def test_members_of_any_group_run_a_job() -> None:
    events: list[Event] = []
    reports = work(ThreadGroup, events)
    values = [decode_value(report.value) for report in reports]
    assert values == [(0, "3", "7,8"), (1, "3", "7,8")]
    assert [report.rank for report in reports] == [0, 1]
    assert {report.pid for report in reports}.isdisjoint({os.getpid()})
    assert {PrintedLine("hello", rank=rank, host="127.0.0.1") for rank in (0, 1)} <= set(events)


def test_secrets_are_not_shown() -> None:
    member = Member(
        FunctionJob(1), {FEED_TOKEN: b"secret-1"}, None, "secret-2", None, loopback=True
    )
    assert "secret" not in repr(member) + repr(StartMember(member, 1))


def test_members_that_were_given_too_little_say_so() -> None:
    found = [work(ThreadGroup, [], resources=r) for r in (Resources(cpus=4), Resources(gpus=3))]
    for reports, text in zip(found, ("4 cpus", "3 gpus"), strict=True):
        assert reports[0].failure is not None
        assert f"worker 0 requests {text} (resources=" in reports[0].failure.message
    for report in work(ThreadGroup, [], resources=Resources(memory="1TB")):
        assert report.failure is not None
        assert report.failure.message.startswith("2 workers need 2 TB of memory (1 TB each), but")
    (first, _) = work(ThreadGroup, [], resources=Resources(cpus=2, gpus=1))
    assert decode_value(first.value) == (0, "2", "7")


def test_members_that_cannot_meet_say_so_by_name() -> None:
    for rank, report in enumerate(work(Lost, [])):
        assert report.failure is not None
        assert (report.failure.rank, report.failure.exception_type) == (rank, "ClusterError")
        assert report.failure.message == "the others cannot be met"


def test_what_makes_no_sense_names_the_worker_that_said_it() -> None:
    for report in work(Garbled, []):
        assert report.failure is not None
        expected = "worker 1 on localhost sent an invalid handshake message"
        assert report.failure.message.startswith(expected)
    for report in work(ThreadGroup, [], fn=leave_half_a_report):
        assert report.failure is not None
        assert report.failure.exception_type == "UnreadableReport"
        assert "its report cannot be read: Unterminated string" in report.failure.message


class FailsOnOne:
    """Rows that one member cannot read."""

    def spool(self, batches: Iterable[Any], rank: int, folder: Path) -> None:
        if rank == 1:
            raise ValueError("a bad row")


def test_what_one_member_cannot_read_stops_all() -> None:
    stopped, failed = (report.failure for report in work(ThreadGroup, [], FailsOnOne()))
    assert failed is not None
    assert stopped is not None
    assert (failed.exception_type, failed.message) == ("ValueError", "a bad row")
    assert (stopped.exception_type, stopped.is_consequence) == ("Stopped", True)
    assert "worker 1 could not" in stopped.message
