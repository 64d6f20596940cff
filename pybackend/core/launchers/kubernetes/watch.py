"""Follow a Job to completion, and explain failures with information from Kubernetes."""

from __future__ import annotations

import calendar
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from pybackend.core.errors import ClusterError, Failure, Kind
from pybackend.core.job.messages import Emit, Note
from pybackend.core.launchers.child import LOG_LINES
from pybackend.core.launchers.kubernetes.cluster import INDEX, Cluster
from pybackend.core.launchers.kubernetes.pod import PodChannel
from pybackend.core.launchers.remote.task import REPORT
from pybackend.core.net.meeting import MeetingServer

_WAITING_SECONDS = 1.0
_RUNNING_SECONDS = 10.0
# Kubernetes knows why a worker exited, but not at once.
_CAUSE_SECONDS = 20.0
_ASK_AGAIN_SECONDS = 0.5
# Without a response, while no worker is connected.
_SILENT_SECONDS = 120.0
_SHOWN_REASONS = 3
# Ends before which a worker receives SIGTERM.
_PREEMPTIONS: set[Kind] = {"Deleted", "Disrupted", "Evicted", "NodeLost", "Preempted", "TimeLimit"}
# Kubernetes tries again, but these problems do not go away by themselves.
_HOPELESS = {
    "ImagePullBackOff": "check that the `image` exists, and that the cluster is allowed to pull "
    "it (`image_pull_secrets`)",
    "InvalidImageName": "write the `image` as registry/name:tag",
    "ErrImageNeverPull": "load the `image` onto the nodes",
    "CreateContainerConfigError": "check that all `secrets` exist in this namespace",
    "CreateContainerError": "see `kubectl describe pod`",
    "RunContainerError": "check that the image has the Python that `python` specifies",
}
_MEMORY = "request more `memory`, or lower batch_size"
_AGAIN = "start again"
# Reasons of a pod's end, or of its disruption.
_ENDS: dict[str, tuple[Kind, str, str]] = {
    "OOMKilled": ("OutOfMemory", "exceeded its memory limit (OOMKilled)", _MEMORY),
    "Evicted": ("Evicted", "was evicted by its node", _MEMORY),
    "PreemptionByScheduler": ("Preempted", "was preempted by one of higher priority", _AGAIN),
    "DeletionByTaintManager": ("NodeLost", "was on a node that was lost or tainted", _AGAIN),
    "EvictionByEvictionAPI": ("Evicted", "was evicted, as when a node is drained", _AGAIN),
    "DeletionByPodGC": ("NodeLost", "was on a node that no longer exists", _AGAIN),
    "TerminationByKubelet": ("Evicted", "was terminated by its node", _AGAIN),
    "NodeLost": ("NodeLost", "was on a node that no longer responds", _AGAIN),
    "NodeShutdown": ("NodeLost", "was on a node that was shut down", _AGAIN),
    "Terminated": ("NodeLost", "was on a node that was shut down", _AGAIN),
    "DeadlineExceeded": ("TimeLimit", "reached its time limit", "increase `time_limit`"),
    "StartError": ("NoPython", "could not start its process", _HOPELESS["RunContainerError"]),
    "ContainerCannotRun": ("NoPython", "could not run", _HOPELESS["RunContainerError"]),
}


@dataclass(frozen=True)
class PodState:
    """A pod, as the API server describes it; or, if ``is_gone``, as it last did."""

    pod: Mapping[str, Any]
    is_gone: bool = False

    @property
    def name(self) -> str:
        return str(self.pod["metadata"]["name"])

    @property
    def rank(self) -> int:
        return int(self.pod["metadata"]["annotations"][INDEX])

    @property
    def node(self) -> str:
        return self.pod["spec"].get("nodeName") or "no node"

    @property
    def runs(self) -> bool:
        return not self.is_gone and "running" in self._state

    @property
    def is_over(self) -> bool:
        """True if it has ended, or is being deleted."""
        return self._status.get("phase") in ("Failed", "Succeeded") or self._is_deleted

    @property
    def has_cause(self) -> bool:
        """True if it is known why the pod ended, and it was not deleted."""
        is_explained = self._find_end() is not None
        return is_explained or (bool(self._terminated) and not self.was_made_to_end)

    @property
    def was_made_to_end(self) -> bool:
        """True if the pod was deleted while it was running."""
        return self._is_deleted and self._terminated.get("exitCode", 143) in (137, 143)

    @property
    def waits_for(self) -> str:
        """Reason why it is not running yet; empty if it is running or has ended."""
        if self.runs or self.is_over:
            return ""
        if self._waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return _say(self._waiting["reason"], self._waiting.get("message"))
        scheduled = self._condition("PodScheduled")
        if scheduled.get("status") == "False":
            return str(scheduled.get("message") or scheduled.get("reason"))
        return "its container is being created"

    @property
    def hopeless(self) -> str:
        """Advice if the pod will never run unless something changes; else empty."""
        return _HOPELESS.get(self._waiting.get("reason"), "")

    def describe_end(self) -> tuple[Kind, str, str]:
        """Return the type, message and advice for the failure of its worker."""
        where = f"its pod {self.name} on {self.node}"
        if found := self._find_end():
            kind, said, advice = _ENDS[found[0]]
            return kind, _say(f"{where} {said}", found[1]), advice
        if self.was_made_to_end:
            advice = "find out who deleted the pod (`kubectl get events`)"
            return "Deleted", f"{where} was deleted", advice
        if not (ended := self._terminated):
            message = f"{where} is {self._status.get('phase', 'Unknown')}, but does not respond"
            return "NodeLost", message, "check whether that node is still running"
        message = f"{where} ended without a report: status {ended.get('exitCode')}"
        return "ProcessDied", _say(message, ended.get("reason")), "see the last lines of its log"

    @property
    def ended_at(self) -> float:
        """Time at which its process ended, in seconds since the epoch; now if unknown."""
        if not (text := self._terminated.get("finishedAt")):
            return time.time()
        return float(calendar.timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")))

    @property
    def _status(self) -> Any:
        return self.pod.get("status") or {}

    @property
    def _state(self) -> Any:
        """State of its container."""
        container: Any = next(iter(self._status.get("containerStatuses") or ()), {})
        return container.get("state", {})

    @property
    def _waiting(self) -> Any:
        return self._state.get("waiting", {})

    @property
    def _terminated(self) -> Any:
        return self._state.get("terminated") or {}

    @property
    def _is_deleted(self) -> bool:
        return self.is_gone or bool(self.pod["metadata"].get("deletionTimestamp"))

    def _condition(self, kind: str) -> Any:
        conditions = self._status.get("conditions") or ()
        return next((one for one in conditions if one["type"] == kind), {})

    def _find_end(self) -> tuple[str, str] | None:
        """Return the most specific reason and its message."""
        for said in (self._condition("DisruptionTarget"), self._status, self._terminated):
            if said.get("reason") in _ENDS:
                return str(said["reason"]), str(said.get("message") or "")
        return None


def _say(what: str, more: Any) -> str:
    return f"{what}: {' '.join(str(more).split())}" if more else what


@dataclass(frozen=True)
class KubernetesJob:
    """A Job; None if it no longer exists."""

    job: Mapping[str, Any] | None

    @property
    def failure(self) -> tuple[str, str]:
        """Reason and message if Kubernetes ended the Job; else empty."""
        deleted = "Deleted", "the Job was deleted"
        if self.job is None:
            return deleted
        since = (self.job.get("metadata") or {}).get("deletionTimestamp")
        for one in (self.job.get("status") or {}).get("conditions") or ():
            if one["type"] in ("Failed", "FailureTarget") and one["status"] == "True":
                # Deletion ends its pods, so it fails afterwards; a failed one is deleted later.
                is_deleted = since and since <= one.get("lastTransitionTime", "")
                found = str(one.get("reason") or "Failed"), str(one.get("message") or "")
                return deleted if is_deleted else found
        return "", ""

    def explain(self, pod: PodState) -> tuple[Kind, str, str]:
        reason, message = self.failure
        if reason == "DeadlineExceeded":
            return "TimeLimit", "the Job reached its time limit", "increase `time_limit`"
        if pod.name in message:  # the pod whose failure ended the others
            return "Disrupted", f"its pod {pod.name} was disrupted: {message}", _AGAIN
        if reason in ("", "Deleted"):
            return pod.describe_end()
        return "Stopped", "ended by Kubernetes because another worker failed", ""


@dataclass
class KubernetesWatch:
    """Information from Kubernetes about a Job; `look` is for `run_group`.

    ``join`` opens the channel to a running pod, given its name and rank. ``on_event`` receives
    notes about pending pods. ``patience`` is the time in seconds within which all pods must be
    running.
    """

    cluster: Cluster
    name: str
    workers: int
    meeting: MeetingServer
    join: Callable[[str, int], PodChannel]
    on_event: Emit
    patience: float

    def __post_init__(self) -> None:
        self._pods: dict[int, PodState] = {}
        self._job = KubernetesJob({})
        self.channels: dict[int, PodChannel] = {}
        self._shown = ""
        self._warnings: list[str] = []
        self._has_started = False
        self._created = self._answered = time.monotonic()
        self._asked = -math.inf

    def look(self) -> list[Failure]:
        """Return the failures of workers that ended without a report.

        Raises `ClusterError` if the pods do not start, or cannot run workers.
        """
        pause = _RUNNING_SECONDS if self._has_started else _WAITING_SECONDS
        if time.monotonic() > self._asked + pause:
            self._ask()
        for channel in self.channels.values():
            channel.check()
        if lost := self._lost():
            self._wait_for_cause(lost)
            return [self._describe(rank) for rank in lost]
        if not self._has_started:
            self._check_start()
        return []

    def explain(self, failure: Failure) -> Failure:
        """Add the reason for SIGTERM to the failure of a worker that exited on its own."""
        self._ask_for_all()
        pod = self._pods.get(failure.rank)
        if pod is None or not (pod.is_over or pod.has_cause):
            return failure
        kind, message, advice = self._explain(pod)
        if kind not in _PREEMPTIONS:
            return failure
        message = f"{message}; {failure.message}"
        return replace(failure, exception_type=kind, message=message, advice=advice)

    def _lost(self) -> list[int]:
        """Return the ranks whose pod or channel ended without a report."""
        silent = [r for r in range(self.workers) if self.meeting.result(r, REPORT) is None]
        return [rank for rank in silent if self._has_ended(rank)]

    def _has_ended(self, rank: int) -> bool:
        if channel := self.channels.get(rank):
            return self.meeting.has_left(rank) or channel.has_ended.is_set()
        return rank in self._pods and self._pods[rank].is_over

    def _ask(self) -> None:
        self._asked = now = time.monotonic()
        try:
            listed = [PodState(pod) for pod in self.cluster.list_pods(self.name)]
        except ClusterError:  # the workers do not need the API server
            if not self._has_started and now > self._answered + _SILENT_SECONDS:
                raise
            return
        self._answered = now
        gone = {rank: replace(pod, is_gone=True) for rank, pod in self._pods.items()}
        self._pods = gone | {pod.rank: pod for pod in listed}
        for pod in listed:
            if pod.runs and pod.rank not in self.channels:
                self.channels[pod.rank] = self.join(pod.name, pod.rank)
        if len(listed) < self.workers and not self._has_started:
            with suppress(ClusterError):  # pods may be missing because they exceed a quota
                self._warnings = self.cluster.list_warnings(self.name)
        self._show()

    def _ask_for_all(self) -> None:
        # The Job first, so that its pods are at least as recent. The other way round, a pod was
        # judged by what was known before its Job failed
        # (test_a_job_that_fails_between_two_questions).
        with suppress(ClusterError):
            self._job = KubernetesJob(self.cluster.read_job(self.name))
        self._ask()

    def _show(self) -> None:
        if self._has_started:
            return
        self._has_started = len(self.channels) == self.workers
        text = f"Kubernetes job {self.name}: {len(self.channels)} of {self.workers} pods running"
        if running := sorted({pod.node for pod in self._pods.values() if pod.runs}):
            text += f" on {', '.join(running)}"
        if reasons := self._reasons():
            text += f"; pending: {reasons}"
        if text != self._shown:
            self.on_event(Note(text))
            self._shown = text

    def _reasons(self) -> str:
        counted = Counter(reason for pod in self._pods.values() if (reason := pod.waits_for))
        reasons = [reason for reason, _ in counted.most_common(_SHOWN_REASONS)]
        return "; ".join([*reasons, *self._warnings[-1:]])

    def _check_start(self) -> None:
        for pod in self._pods.values():
            if pod.hopeless:
                raise ClusterError(
                    f"pod {pod.name} on {pod.node} cannot start: {pod.waits_for}. It was deleted; "
                    f"{pod.hopeless}"
                )
        if time.monotonic() >= self._created + self.patience:
            raise ClusterError(
                f"{len(self.channels)} of {self.workers} pods of {self.name} started within "
                f"{self.patience:g} s (`patience` of kubernetes()); pending: "
                f"{self._reasons() or 'Kubernetes gives no reason'}. All were deleted: request "
                "less, or increase `patience`"
            )

    def _wait_for_cause(self, lost: Sequence[int]) -> None:
        """Wait until Kubernetes knows why; raise the error of a channel whose pod is running."""
        deadline = time.monotonic() + _CAUSE_SECONDS
        while not self._knows_cause(lost) and time.monotonic() < deadline:
            time.sleep(_ASK_AGAIN_SECONDS)
        for rank in lost:
            channel = self.channels.get(rank)
            if channel is not None and channel.trouble is not None and self._pods[rank].runs:
                raise channel.trouble

    def _knows_cause(self, lost: Sequence[int]) -> bool:
        self._ask_for_all()
        return bool(self._job.failure[0]) or any(self._pods[rank].has_cause for rank in lost)

    def _explain(self, pod: PodState) -> tuple[Kind, str, str]:
        return self._job.explain(pod) if pod.was_made_to_end else pod.describe_end()

    def _describe(self, rank: int) -> Failure:
        pod = self._pods[rank]
        kind, message, advice = self._explain(pod)
        log = self.cluster.read_log(pod.name, LOG_LINES)
        return Failure(rank, pod.node, kind, message, log=log, time=pod.ended_at, advice=advice)
