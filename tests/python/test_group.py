"""The driver's loop over a worker group, whose members are real connections of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from conftest import wait_for

from pybackend.core.errors import ClusterError, Failure, Moment, WorkerFailedError
from pybackend.core.job.codec import encode
from pybackend.core.job.job import FunctionJob, Job, TrainingJob
from pybackend.core.job.messages import (
    Begun,
    Event,
    Failed,
    Note,
    Order,
    PrintedLine,
    Reported,
    Standby,
)
from pybackend.core.job.report import WorkerReport
from pybackend.core.job.worker_options import Elastic, ParameterServer, Resources
from pybackend.core.launchers.base import Outcome
from pybackend.core.launchers.hosts.launcher import _Slots
from pybackend.core.launchers.hosts.ssh import HostSlots
from pybackend.core.launchers.kubernetes import pod as pod_task
from pybackend.core.launchers.member import Member
from pybackend.core.launchers.remote.group import Follow, Start, Way, run_group, run_on_hosts
from pybackend.core.launchers.remote.task import MODEL, REPORT, TASK, Post, RemoteTask, read_post
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.meeting_client import MeetingClient

TOKEN = "token"


class Group:
    """A driver with its members."""

    def __init__(self, stack: ExitStack, job: Job) -> None:
        self.job = job
        self.meeting = stack.enter_context(MeetingServer("127.0.0.1", TOKEN, job.workers))
        self.members = [
            stack.enter_context(MeetingClient(self.meeting.address, TOKEN, rank, 10.0))
            for rank in range(job.workers)
        ]
        for member in self.members:
            member.require()
        self.events: list[Event] = []

    def report(self, rank: int, failure: Failure | None = None) -> None:
        report = WorkerReport(rank, f"h{rank}", 1, failure=failure)
        self.members[rank].send(REPORT, encode(report).encode())
        self.members[rank](Reported())

    def run(
        self, look: Callable[[], Sequence[Failure]] = list, meet_seconds: float = 60.0
    ) -> Outcome:
        hosts = [f"h{rank}" for rank in range(self.job.workers)]
        return run_group(self.meeting, self.job, hosts, self.events.append, look, meet_seconds)


@pytest.fixture
def group() -> Iterator[Group]:
    with ExitStack() as stack:
        yield Group(stack, FunctionJob(2))


def fail(rank: int, message: str) -> Failure:
    return Failure(rank, f"h{rank}", "ValueError", message, time=1.0)


def test_events_reports_and_the_model_come_back(group: Group) -> None:
    group.members[1](PrintedLine("hello"))
    group.members[0].send(f"{MODEL}h5", b"weights")
    group.report(0)
    group.report(1)
    outcome = group.run()
    assert [report.rank for report in outcome.reports] == [0, 1]
    assert outcome.model == ("h5", b"weights")
    assert group.events == [PrintedLine("hello", rank=1)]


def test_a_failed_worker_is_the_cause_whatever_comes_after(group: Group) -> None:
    group.report(1, fail(1, "no such luck"))
    group.members[0](Failed(Failure(0, "h0", "PeerLostError", "lost worker 1", time=0.5)))
    with pytest.raises(WorkerFailedError, match="worker 1 on h1 failed: ValueError: no such luck"):
        group.run()


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b"[" * 100_000], ids=range(4))
def test_a_report_that_makes_no_sense_is_its_workers_failure(group: Group, content: bytes) -> None:
    group.report(0)
    group.members[1].send(REPORT, content)
    group.members[1](Reported())
    with pytest.raises(WorkerFailedError, match="worker 1 on h1 failed: UnreadableReport: its"):
        group.run()


def test_what_the_platform_knows_ends_the_group(group: Group) -> None:
    group.report(0)
    with pytest.raises(WorkerFailedError, match="worker 1 on h1 failed: ValueError: preempted"):
        # After the report of a worker, nothing else counts.
        group.run(lambda: [fail(0, "node lost"), fail(1, "preempted")])


def test_what_a_worker_said_goes_before_what_the_platform_says(group: Group) -> None:
    said = threading.Event()

    def look() -> Sequence[Failure]:
        if not said.is_set():
            group.report(1, fail(1, "no such luck"))
            said.set()
        raise ClusterError("the job was cancelled")

    with pytest.raises(WorkerFailedError, match="no such luck"):
        group.run(look)


def test_without_a_worker_that_knows_the_platform_is_heard(group: Group) -> None:
    def look() -> Sequence[Failure]:
        raise ClusterError("the job was cancelled")

    with pytest.raises(ClusterError, match="the job was cancelled"):
        group.run(look)


def test_a_worker_that_leaves_without_a_word_is_named(group: Group) -> None:
    group.report(0)
    group.members[1].close()
    with pytest.raises(WorkerFailedError, match="worker 1 on h1 failed: WorkerLost"):
        group.run()


def test_a_worker_that_does_not_come_is_named(group: Group) -> None:
    def gather() -> None:
        with pytest.raises(ClusterError, match="lost the driver"):
            group.members[0].gather("")

    thread = threading.Thread(target=gather)
    thread.start()
    wait_for(lambda: group.meeting.missing()[0] == [1])
    expected = "worker 1 on h1 did not connect to the others within 0 s"
    with pytest.raises(ClusterError, match=expected):
        group.run(meet_seconds=0.2)
    group.meeting.__exit__()
    thread.join(60)


def test_servers_go_on_without_a_worker_but_not_without_all() -> None:
    roles = (("chief", 1), ("worker", 2), ("ps", 1))
    job = TrainingJob(4, exchange=ParameterServer(), roles=roles)
    with ExitStack() as stack:
        group = Group(stack, job)
        group.members[0](Begun())
        group.report(1, Failure(1, "h1", "ProcessDied", "killed"))
        for rank in (0, 2, 3):
            group.report(rank)
        assert [report.ok for report in group.run().reports] == [True, False, True, True]
        assert group.events == [
            Note("worker 1 on h1 was lost (killed): training continues without it and its rows"),
            Moment(0.0, "lost", "killed", rank=1, host="h1"),
        ]
    with ExitStack() as stack:
        group = Group(stack, job)
        group.members[0](Begun())
        group.report(1, Failure(1, "h1", "ProcessDied", "killed", time=1.0))
        group.report(3)
        group.members[2].close()
        group.members[0](Failed(Failure(0, "h0", "PeerLostError", "lost worker 2", time=0.5)))
        with pytest.raises(WorkerFailedError, match="worker 1 on h1 failed: ProcessDied") as caught:
            group.run()
        assert {failure.rank for failure in caught.value.others} == {0, 2}
    with ExitStack() as stack:
        group = Group(stack, job)
        for rank in (0, 2, 3):
            group.report(rank)
        with pytest.raises(WorkerFailedError, match="worker 1 on h1 failed: HostLost"):
            group.run(lambda: [Failure(1, "h1", "HostLost", "gone before it had begun")])


class Threads(Way):
    """A cluster system whose workers are threads of this process."""

    def name_host(self, number: int, place: int) -> str:
        return f"h{place}"

    def listen(self, workers: int) -> MeetingServer:
        return MeetingServer("127.0.0.1", TOKEN, workers)

    @contextmanager
    def open(self, start: Start) -> Iterator[Follow]:
        def work(rank: int) -> None:
            with MeetingClient(start.meeting.address, TOKEN, rank, 10.0) as member:
                member.require()
                if start.number is not None:
                    member(Standby(f"h{start.place}:1", 0))
                    while not isinstance(member.poll_order(), Order):
                        if ended.wait(0.01):  # it was started, but is no longer needed
                            return
                failure = fail(rank, "no such luck") if start.number == self.failing else None
                report = WorkerReport(rank, f"h{start.place}", 1, failure=failure)
                member.send(REPORT, encode(report).encode())
                member(Reported())
                ended.wait(30)

        ended, hosts = threading.Event(), [f"h{rank}" for rank in range(start.job.workers)]
        threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(hosts))]
        for thread in threads:
            thread.start()
        try:
            yield partial(run_group, start.meeting, start.job, hosts, look=list)
        finally:
            ended.set()
            for thread in threads:
                thread.join(30)
            self.ended.append(start.number)

    def __init__(self, failing: int = -1) -> None:
        self.failing, self.ended = failing, list[int | None]()


def test_one_way_starts_a_group_and_workers_one_by_one() -> None:
    rows, way = {"train": {"x": np.zeros((4, 1))}}, Threads()
    outcome = run_on_hosts(way, TrainingJob(2), rows, print, 2, "")
    assert [report.rank for report in outcome.reports] == [0, 1]
    elastic = TrainingJob(2, elastic=Elastic(max=2))
    outcome = run_on_hosts(way, elastic, rows, print, 2, "")
    assert [report.host for report in outcome.reports] == ["h0", "h1"]
    assert [generation.workers for generation in outcome.generations] == [[0, 1]]
    assert sorted(way.ended[1:], key=str) == [0, 1]
    assert way.ended[0] is None
    with pytest.raises(WorkerFailedError, match="worker 1 on h0 failed: ValueError: no such luck"):
        run_on_hosts(Threads(failing=1), elastic, rows, print, 2, "")


def test_a_worker_in_any_slot_finds_its_host_in_its_own_list(tmp_path: Path) -> None:
    start = Start(FunctionJob(1), MeetingServer(None, "", 1), print, number=3, place=1)
    for name, content in start.post().items():
        (tmp_path / name).write_bytes(content)
    assert read_post(tmp_path) == Post(3)  # as a job of Slurm has a single host
    assert start.name("tfdist-1") == "tfdist-1-3"


def test_elastic_workers_of_two_jobs_on_a_host_have_their_own_parts_of_it(tmp_path: Path) -> None:
    host = HostSlots("a", slots=2, first=2, neighbours=4)  # the second of two jobs
    slots: Any = _Slots(None, [host, host], None, {}, tmp_path, {})  # type: ignore[arg-type]
    start = Start(FunctionJob(1), MeetingServer(None, "", 1), print, number=5, place=1)
    assert slots._slots_of(start) == [HostSlots("a", slots=1, first=3, neighbours=4)]


def test_a_worker_in_a_pod_gets_the_gpus_that_it_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Any] = []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(pod_task, "take_part", lambda *what: given.append(what[5]) or True)
    for gpus in (None, 1):
        job = FunctionJob(1, resources=Resources(gpus=gpus))
        task = RemoteTask(Member(job, {}, None, "", None, False), ("h0",))
        (tmp_path / TASK).write_bytes(cloudpickle.dumps(task))
        assert pod_task._work(0, tmp_path, None)  # type: ignore[arg-type]
    assert given == [None, ["0", "1"]]
