"""Follow a job from the queue to completion, and explain failures with Slurm's information."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from pybackend.core.errors import ClusterError, Failure, Kind
from pybackend.core.job.messages import Emit, Note
from pybackend.core.job.notice import RESTARTS
from pybackend.core.launchers.child import LOG_LINES
from pybackend.core.launchers.remote.task import REPORT
from pybackend.core.launchers.slurm import commands
from pybackend.core.net.meeting import MeetingServer

# Slurm's controller serves many users.
_BEGINNING_SECONDS = 0.5
_WAITING_SECONDS = 2.0
_LONGEST_SECONDS = 30.0  # once the job has waited for a quarter of an hour
_RUNNING_SECONDS = 10.0
# Slurm knows why a worker exited, but not at once.
_CAUSE_SECONDS = 30.0
_ASK_AGAIN_SECONDS = 0.5
# From the start of the job until the first worker connects.
_START_SECONDS = 600.0
_SILENT_SECONDS = 600.0
# Time that a step waits for a node before it reports so.
_QUIET_SECONDS = 10.0
_DRAIN_SECONDS = 2.0
# srun's messages while a step waits for a node, and about the tasks that failed first.
_STEP_WAITS = re.compile(r"^srun: .*step creation \w+ disabled, retrying \((.*)\)$")
_TASKS_FAILED = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.*)$", re.MULTILINE)


@dataclass
class SlurmWatch:
    """Slurm's information about a job; `look` is for `run_group`.

    ``on_event`` receives the state of the job in the queue, where it may wait ``patience`` seconds.
    ``notice_seconds`` is the longest time before the time limit at which Slurm can send SIGTERM.
    ``start`` is called when the job is running, to start workers that its script does not start.
    ``has_ended`` returns whether the workers have ended, even if the job continues.
    ``busy_seconds`` is the longest time that a step may wait for a free node of the job.
    """

    number: str
    files: JobFiles
    meeting: MeetingServer
    on_event: Emit
    patience: float
    notice_seconds: float
    start: Callable[[], None] = lambda: None
    has_ended: Callable[[], bool] = lambda: False
    busy_seconds: float = math.inf

    def __post_init__(self) -> None:
        self._state = commands.SlurmJob(self.number, "PENDING")
        self._shown = ""
        self._submitted = self._answered = time.monotonic()
        self._asked, self._started, self._busy_since = -math.inf, math.inf, math.inf
        self._is_busy = self._has_explained = False

    def look(self) -> list[Failure]:
        """Return the failures of workers that ended without a report.

        Raises `ClusterError` if the job does not start, or its workers do not connect.
        """
        if time.monotonic() > self._asked + self._pause():
            self._ask()
        if lost := self._lost():
            self._wait_for_cause()
        if self._state.is_over:  # their messages may still be in transit
            self.meeting.drain(_DRAIN_SECONDS)
            lost = self._silent()
        elif not lost:
            self._check_start()
        return [self._describe(rank) for rank in lost]

    def explain(self, failure: Failure) -> Failure:
        """Add why Slurm sent SIGTERM to the failure of a worker that exited on its own."""
        if not self._has_explained:  # several ranks get the signal at once
            self._ask()
            if not (self._state.is_preempted or self._state.seconds_left < self.notice_seconds):
                self._wait_for_cause()
        self._has_explained = True
        if (found := describe_notice(self._state, self.notice_seconds)) is None:
            return failure
        kind, message, advice = found
        message = f"{message} (Slurm job {self.number}); {failure.message}"
        return replace(failure, exception_type=kind, message=message, advice=advice)

    def _pause(self) -> float:
        if not self._is_empty():  # workers connect on their own when they start
            return _RUNNING_SECONDS if self._state.is_running else _BEGINNING_SECONDS
        waited = time.monotonic() - self._submitted
        # A controller of many users does not answer those who ask all night
        # (test_slurm_is_asked_less_often_the_longer_a_job_waits).
        return min(max(_WAITING_SECONDS, waited / 30), _LONGEST_SECONDS)

    def _is_empty(self) -> bool:
        """Return whether no worker has connected yet."""
        return not any(map(self.meeting.has_come, range(len(self.files))))

    def _silent(self) -> list[int]:
        return [r for r in range(len(self.files)) if self.meeting.result(r, REPORT) is None]

    def _lost(self) -> list[int]:
        if self.has_ended():
            return self._silent()
        return [rank for rank in self._silent() if self.meeting.has_left(rank)]

    def _ask(self) -> None:
        self._asked = now = time.monotonic()
        try:
            self._state = commands.show_job(self.number)
        except ClusterError:  # the workers do not need Slurm
            if now > self._answered + _SILENT_SECONDS and math.isinf(self._started):
                raise
            return
        self._answered = now
        if self._state.is_running:
            self._started = min(self._started, now)
            self.start()
            self._look_for_node(now)
        if (shown := self._state.describe()) != self._shown and not self._state.is_over:
            self.on_event(Note(shown))
            self._shown = shown

    def _look_for_node(self, now: float) -> None:
        reason = self.files.why_step_waits() if self._is_empty() else None
        if reason is None:
            self._is_busy, self._busy_since = False, math.inf
            return
        # The time to connect has not begun: a step that waited for a node was reported as one whose
        # network is broken
        # (test_a_step_that_waits_for_a_node_reports_so_and_fails_if_training_cannot_begin).
        self._started = now
        self._busy_since = min(self._busy_since, now)
        busy = f"Slurm job {self.number} has no free node for another worker (srun: {reason})"
        if not self._is_busy and now > self._busy_since + _QUIET_SECONDS:
            self._is_busy = True
            self.on_event(Note(f"{busy}: the worker waits for one"))
        if now > self._busy_since + self.busy_seconds:
            raise ClusterError(
                f"{busy}: a node has failed, or other steps use it. Request more `nodes` of "
                "slurm(), or use fewer workers"
            )

    def _check_start(self) -> None:
        now = time.monotonic()
        if math.isinf(self._started):
            if self._state.is_hopeless:
                raise ClusterError(
                    f"{self._state.describe()}. For this reason it would never start, so it was "
                    f"cancelled. {commands.explain_refusal(self._state.reason)}".rstrip()
                )
            if now > self._submitted + self.patience:
                raise ClusterError(
                    f"{self._state.describe()}; it did not start within {self.patience:g} s "
                    "(`patience` of slurm()) and was cancelled"
                )
        # Once one has connected, `run_group` waits for the others.
        elif now > self._started + _START_SECONDS and self._is_empty():
            raise ClusterError(
                f"no worker of Slurm job {self.number} connected within {_START_SECONDS:.0f} s of "
                f"its start on {', '.join(self._state.nodes)}: these nodes must be able to reach "
                f"the driver at {self.meeting.address}"
            )

    def _wait_for_cause(self) -> None:
        deadline = time.monotonic() + _CAUSE_SECONDS
        while not self._knows_cause() and time.monotonic() < deadline:
            time.sleep(_ASK_AGAIN_SECONDS)

    def _knows_cause(self) -> bool:
        self._ask()
        with suppress(ClusterError):
            is_over = self._state.is_over or self.has_ended()
            return is_over or bool(commands.lost_nodes(self._state.nodes))
        return False

    def _describe(self, rank: int) -> Failure:
        first, host = self.files.first_failed(), self.files[rank]
        kind, message, advice = describe_end(self._state, host, first.get(rank))
        if kind == "ProcessDied" and first and rank not in first:
            kind, message = "Stopped", "ended by srun because another worker failed"
        log = self.files.last_lines(rank)
        if kind == "ProcessDied":
            advice = self._advise(log) or advice
        message = f"{message} (Slurm job {self.number})"
        return Failure(rank, host, kind, message, log=log, time=time.time(), advice=advice)

    def _advise(self, log: Sequence[str]) -> str:
        if log:
            return commands.explain_log(log)
        if self.files.batch_log.exists():
            return "a command of slurm()'s `setup` seems to have failed: try it on a node"
        return (
            f"{self.files.folder} must be on a file system that nodes share with this machine: "
            "choose another `folder` of slurm()"
        )


class JobFiles(Sequence[str]):
    """Files that a job's tasks write into its folder; index it by rank to get the rank's host."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder, self._workers = folder, workers
        # Of the batch script and of srun itself; then the pattern from which srun names the logs of
        # tasks, with rank and host.
        self.batch_log, self.task_log = folder / "job.log", folder / "worker-%t-%N.log"

    def __len__(self) -> int:
        return self._workers

    def __getitem__(self, rank: int) -> str:  # type: ignore[override]
        """Return the host of a rank, once its task has started."""
        found = [path.stem.split("-", 2)[2] for path in self._logs(rank)]
        return found[0] if found else "no host yet"

    def last_lines(self, rank: int) -> tuple[str, ...]:
        paths = [*self._logs(rank), self.batch_log]
        texts = [path.read_text(errors="replace") for path in paths if path.exists()]
        return tuple("\n".join(texts).splitlines()[-LOG_LINES:])

    def first_failed(self) -> dict[int, str]:
        """Return srun's messages about the tasks that ended first, by rank."""
        if (found := _TASKS_FAILED.search(self._read_log())) is None:
            return {}
        return {int(rank): found[2] for rank in commands.expand_nodes(f"[{found[1]}]")}

    def why_step_waits(self) -> str | None:
        """Return srun's reason if a step is waiting for a node of its job, else None."""
        lines = self._read_log().splitlines()
        found = _STEP_WAITS.search(lines[-1]) if lines else None
        return found and found[1]

    def _read_log(self) -> str:
        return self.batch_log.read_text(errors="replace") if self.batch_log.exists() else ""

    def _logs(self, rank: int) -> list[Path]:
        return list(self.folder.glob(f"worker-{rank}-*.log"))


_MORE_MEMORY = "request more `memory` in `resources`, or lower `batch_size`"
_UNPREEMPTED = "start again, or use a partition whose jobs are not preempted"
_CAUSES: dict[str, tuple[Kind, str, str]] = {
    "BOOT_FAIL": ("NodeFailed", "a node of the job did not boot", "start again"),
    "CANCELLED": ("Cancelled", "the job was cancelled", "find out who cancelled it (scancel)"),
    "DEADLINE": ("TimeLimit", "the job's deadline passed", "set a later deadline"),
    "NODE_FAIL": ("NodeFailed", "a node of the job failed", "start again"),
    "OUT_OF_MEMORY": ("OutOfMemory", "the job exceeded its memory limit", _MORE_MEMORY),
    "PREEMPTED": ("Preempted", "the job was preempted by one of higher priority", _UNPREEMPTED),
    "TIMEOUT": ("TimeLimit", "the job reached its time limit", "increase `time` of slurm()"),
}


def describe_end(state: commands.SlurmJob, host: str, said: str | None) -> tuple[Kind, str, str]:
    """Return the type, message and advice for the failure of a worker that did not report.

    ``said`` is srun's message about its task, if that failed first.
    """
    cause = "PREEMPTED" if state.is_preempted else state.state
    if cause in _CAUSES:
        return _CAUSES[cause]
    # A job that continues no longer has the node. Slurm's controller may be unreachable as well.
    with suppress(ClusterError):
        if commands.lost_nodes((host,)):
            return "NodeFailed", "its node no longer responds to Slurm", "start again"
    message = f"its task ended without a report: {said or state.state.lower()}"
    return "ProcessDied", message, "see the last lines of its log"


def describe_notice(
    state: commands.SlurmJob, notice_seconds: float
) -> tuple[Kind, str, str] | None:
    """Return why workers received SIGTERM, as `describe_end` does; None if Slurm does not know.

    ``notice_seconds`` is as in `SlurmWatch`.
    """
    is_late = state.seconds_left < notice_seconds
    cause = "PREEMPTED" if state.is_preempted else "TIMEOUT" if is_late else state.state
    if cause not in _CAUSES:
        return None
    kind, message, advice = _CAUSES[cause]
    return kind, message, advice if cause == "CANCELLED" else f"{advice}; {RESTARTS}"
