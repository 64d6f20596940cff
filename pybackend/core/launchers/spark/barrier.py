"""Launcher of workers in the tasks of a Spark barrier stage, for classic and Connect sessions.

The whole job is ``DataFrame.mapInArrow(task, barrier=True)``: Spark starts either all tasks
together or none, and each task runs one worker process (`barrier_task`).

All tasks of a barrier stage end when one of them fails. So that the others continue, each worker of
elastic training has its own stage of one task. A worker that waits for a slot is a job in Spark's
queue.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from pybackend.core.data.spark_rows import DataFrameRows
from pybackend.core.errors import ClusterError, Failure, InputError
from pybackend.core.job.job import LOGGER, Job, TrainingJob, argument_of
from pybackend.core.job.messages import Emit, Event, Standby
from pybackend.core.launchers.base import DataSets, Files, Outcome, Submission, check_stop
from pybackend.core.launchers.fork_server import is_off
from pybackend.core.launchers.member import Member
from pybackend.core.launchers.remote.group import Follow, Start, Way, run_group, run_on_hosts
from pybackend.core.launchers.remote.task import REPORT, Post, receive_model
from pybackend.core.launchers.spark import barrier_task as tasks
from pybackend.core.launchers.spark import sessions, slots, stage
from pybackend.core.launchers.spark import spark_jobs as jobs
from pybackend.core.launchers.spark.explain import explain_spark_error, quiet_log, run_explained
from pybackend.core.machine.packages import SET_PYSPARK_PYTHON
from pybackend.core.net.authentication import new_token
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.rendezvous import split_address

# Tasks of a barrier stage start together, but Python may start slowly on a busy host.
_MEET_SECONDS = 15.0
# Spark sends an environment to an executor before the task starts.
_INSTALL_SECONDS = 1800.0
# The last bytes of a model may still be on their way when its task has ended.
_DELIVERY_SECONDS = 60.0
# Share of Spark's limit for results; reports and Arrow's overhead need the rest.
_RESULT_SHARE = 0.9


class SparkLauncher:
    """Launcher that runs workers in the tasks of a barrier stage, in a classic or Connect session.

    ``look`` is called repeatedly while the workers run; an error that it raises stops them. With
    ``on_wait``, the workers wait for slots that other jobs hold, as long as tasks of those jobs are
    running. If the wait is long, ``on_wait`` is called once, with a description. Without it, they
    fail after a minute. ``lanes`` is the number of such launchers that run at once.
    """

    where = "tasks of a Spark job"
    is_here = False
    workers = None
    why_fixed = None

    def __init__(
        self,
        session: Any,
        look: Callable[[], object] = check_stop,
        on_wait: Callable[[str], object] | None = None,
        lanes: int = 1,
    ) -> None:
        self.session, self._look, self._on_wait, self._lanes = session, look, on_wait, lanes

    @property
    def why_bound(self) -> str | None:
        """Reason why the session ends with this process; None: it has a server of its own."""
        return sessions.why_not_handed_over(self.session)

    def describe(self, job: Job) -> Submission:
        """Return what `launch` would start, after its checks; no Spark job is run."""
        slots.make_profile(self.session, job.resources, job.workers)
        slots.check_slots(self.session, job.workers, job.resources)
        later = "on which executors Spark starts the tasks, and what their Python has"
        where = "its own Spark job" if job.is_elastic else "a task of the barrier stage"
        return Submission((where,) * job.workers, later=(later,))

    @contextmanager
    def divide(
        self, job: Job, most: int, parallelism: int | None
    ) -> Iterator[Sequence[SparkLauncher]]:
        """Return launchers that take turns in the session's slots, one for each part of them."""
        workers = job.most_workers
        available = slots.check_slots(self.session, workers, job.resources)
        lanes = slots.choose_lanes(available, workers, most, parallelism)
        slots.make_profile(self.session, job.resources, workers * lanes)
        yield [SparkLauncher(self.session, on_wait=LOGGER.info, lanes=lanes)] * lanes

    def launch(self, job: Job, files: Files, datasets: DataSets, on_event: Emit) -> Outcome:
        """Run all workers of a job to completion, in one Spark job, or each in its own."""
        session, token = self.session, new_token()
        profile = slots.make_profile(session, job.resources, job.workers)
        available = slots.check_slots(session, job.workers, job.resources)
        job = _with_model_limit(session, job)
        if is_off():
            job = replace(job, resources=replace(job.resources, fork_server=None))
        sessions.ship_package(session)
        member = Member(job, files, None, token, None, sessions.is_one_machine(session))
        with ExitStack() as stack:
            if self._on_wait:
                owner, held = sessions.owner_of(session), min(job.most_workers, available)
                stack.enter_context(slots.take_slots(owner, held, available, self._on_wait))
            self._look()  # the caller may have given up meanwhile
            stack.enter_context(sessions.driver_python(session))
            stage.check_hosts(session, job, datasets)
            run = partial(run_explained, session, check=self._look, on_wait=self._on_wait)
            addresses = stage.driver_addresses(session)
            environment = stack.enter_context(
                stage.sent_environment(session, job, addresses, run, on_event, profile)
            )
            cores = slots.cores_of_task(session, job.most_workers * self._lanes, job.resources.cpus)
            options = stage.choose_options(profile)
            stack.enter_context(sessions.small_batches(session))
            task = tasks.Task(member, cores, environment)
            if isinstance(job, TrainingJob) and job.is_elastic:
                return _train_elastically(session, job, task, options, datasets, on_event)
            frame, source, counts = stage.input_frame(session, job, datasets)
            patience = _MEET_SECONDS if environment is None else _INSTALL_SECONDS
            server = stack.enter_context(stage.open_meeting(session, token, job, patience))
            if job.is_observed and not server.address:
                raise ClusterError(tasks.NO_OBSERVING)
            address = server.address or None
            member = replace(member, source=source, driver=address, counts=counts)
            task = replace(task, member=member)
            size = sum(map(len, files.values()))
            plan = sessions.map_in_arrow(frame, task, tasks.SCHEMA, size, **options)
            return self._run_stage(job, plan, server, on_event, datasets)

    def _run_stage(
        self, job: Job, plan: Any, server: MeetingServer, on_event: Emit, datasets: DataSets
    ) -> Outcome:
        session, rows = self.session, list[Any]()

        def watch() -> dict[int, str] | None:
            if not collecting.is_over:
                collecting.watch.look()
                return None
            rows.extend(collecting.result())
            if not rows:
                raise _explain_no_rows(datasets)
            server.drain(_DELIVERY_SECONDS)
            return {row["rank"]: row["report"] for row in rows if row["report"] is not None}

        explain = partial(explain_spark_error, session=session)
        call = jobs.running(session, partial(collect_rows, plan), on_wait=self._on_wait)
        with quiet_log(session), call as collecting:
            crew = stage.follow_stage(job, server, on_event, watch, explain, self._look)
        reports, model = crew.conclude(), receive_model(server)
        pieces = [row for row in rows if row["model"] is not None]
        if pieces:  # the driver could not be reached
            model = pieces[0]["model_format"], b"".join(row["model"] for row in pieces)
        return Outcome(reports, model)


def _train_elastically(
    session: Any,
    job: TrainingJob,
    task: tasks.Task,
    stage_options: Mapping[str, Any],
    datasets: DataSets,
    on_event: Emit,
) -> Outcome:
    """Run elastic training; ``task`` has what its workers have in common, except their rows."""
    frame, source, _ = stage.input_frame(session, replace(job, workers=1), datasets)
    task = replace(task, member=replace(task.member, source=source))
    inherit = jobs.remember_properties(session)
    way = TaskWay(session, frame, task, stage_options, datasets, inherit)
    with quiet_log(session):
        return run_on_hosts(way, job, {}, on_event, job.most_workers, SET_PYSPARK_PYTHON)


def launcher_of(target: Any) -> SparkLauncher | None:
    return SparkLauncher(target) if sessions.is_session(target) else None


def _explain_no_rows(datasets: Mapping[str, Any]) -> InputError | ClusterError:
    """Return the error for a Spark job without result rows."""
    # Spark does not start a task for a DataFrame that it knows is empty, and it does not always
    # report that it ran out of memory.
    frames = {n: rows.frame for n, rows in datasets.items() if isinstance(rows, DataFrameRows)}
    for name, frame in frames.items():
        if jobs.run_watched(frame.sparkSession, frame.isEmpty):
            return InputError(f"`{argument_of(name)}` has no rows")
    return ClusterError(
        "Spark ran the workers, but did not deliver their results: usually its driver has too "
        "little memory. Raise spark.driver.memory, or set `uri` of `model_options`"
    )


def _with_model_limit(session: Any, job: Job) -> Job:
    """Return the job, limited to the model size that the driver's setting lets Spark return."""
    if not isinstance(job, TrainingJob):
        return job
    limit = sessions.read_setting(session, "spark.driver.maxResultSize") or "1g"
    known = re.fullmatch(r"(\d+)([kmgtp]?)b?", limit.strip().lower())
    if known is None or int(known[1]) == 0:  # 0: no limit
        return job
    most = int(known[1]) << 10 * " kmgtp".index(known[2] or " ")
    return replace(job, model_limit=min(job.model_limit, int(most * _RESULT_SHARE)))


def collect_rows(result: Any) -> list[Any]:
    """Return all rows: as Arrow if this pyspark release supports it, to copy them less often."""
    return list(result.toArrow().to_pylist() if hasattr(result, "toArrow") else result.collect())


# For a task to end when its worker has reported.
_END_SECONDS = 10.0


@dataclass(frozen=True)
class TaskWay(Way):
    """A `Way` that runs a Spark job for each worker.

    ``frame`` has all rows in one partition. ``task`` is what all workers have in common, and
    ``stage_options`` are further arguments of ``mapInArrow``. ``inherit``, called on each worker's
    thread, gives it the caller's local properties of Spark.
    """

    session: Any
    frame: Any
    task: tasks.Task
    stage_options: Mapping[str, Any]
    datasets: DataSets
    inherit: Callable[[], None]
    _hosts: dict[int, list[str]] = field(default_factory=dict)
    _receiving: set[int] = field(default_factory=set)

    def name_host(self, number: int, place: int) -> str:
        return self._hosts.get(number, [stage.UNKNOWN_HOST])[0]

    def listen(self, workers: int) -> MeetingServer:
        member = self.task.member
        return stage.open_meeting(self.session, member.token, replace(member.job, workers=workers))

    @contextmanager
    def open(self, start: Start) -> Iterator[Follow]:
        number, meeting = start.number, start.meeting
        assert number is not None
        self.inherit()
        plan = self._plan(number, meeting)
        host = self._hosts[number] = [stage.UNKNOWN_HOST]
        # The first ones need a slot now; the others may wait until one is free.
        idle_seconds = None if number < self.task.member.job.workers else math.inf
        with jobs.running(self.session, plan.collect, idle_seconds) as task:

            def look() -> list[Failure]:
                # Behind a worker that is receiving rows, the time without a task does not count:
                # the others were given up after a minute
                # (test_a_worker_waits_for_a_slot_while_another_receives_its_rows).
                if task.watch.is_busy or not self._receiving - {number}:
                    task.watch.look()
                is_receiving = task.watch.is_busy and host[0] == stage.UNKNOWN_HOST
                (self._receiving.add if is_receiving else self._receiving.discard)(number)
                return self._find_failures(task, meeting, host[0]) if task.is_over else []

            def follow(on_event: Emit) -> Outcome:
                def hear(event: Event) -> object:
                    if isinstance(event, Standby):
                        host[0] = split_address(event.address)[0]
                    return on_event(event)

                return run_group(meeting, start.job, host, hear, look, math.inf)

            try:
                yield follow
            finally:
                self._receiving.discard(number)
            if meeting.result(0, REPORT) is not None:
                task.wait(_END_SECONDS)

    def _plan(self, number: int, meeting: MeetingServer) -> Any:
        member = replace(self.task.member, driver=meeting.address)
        post = Post(number, compares_rows=isinstance(member.source, tasks.RowsOfFrame))
        own = tasks.ElasticTask(replace(self.task, member=member), post)
        size = sum(map(len, member.files.values()))
        return sessions.map_in_arrow(self.frame, own, tasks.SCHEMA, size, **self.stage_options)

    def _find_failures(
        self, task: jobs.RunningCall[Any], meeting: MeetingServer, host: str
    ) -> list[Failure]:
        """Return why a Spark job has ended; what its worker has sent takes precedence."""
        try:
            task.result()
        except ClusterError:
            raise
        except Exception as error:
            if found := stage.find_failures(str(error)):
                is_known = host != stage.UNKNOWN_HOST
                return [replace(one, host=host) if is_known else one for one in found]
            raise explain_spark_error(error, self.session) from None
        if not meeting.has_come(0):
            raise _explain_no_rows(self.datasets)
        return []
