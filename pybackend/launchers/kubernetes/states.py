"""State of a pod, with the reasons why it is waiting or has ended, and advice."""

from __future__ import annotations

import calendar
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pybackend.errors import Kind
from pybackend.launchers.kubernetes.manifests import INDEX

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
    """A pod, as the API server describes it.

    ``is_gone`` is True if the pod no longer exists: this is its last known state.
    """

    pod: Mapping[str, Any]
    is_gone: bool = False

    @property
    def name(self) -> str:
        """Name of the pod."""
        return str(self.pod["metadata"]["name"])

    @property
    def rank(self) -> int:
        """Rank of its worker."""
        return int(self.pod["metadata"]["annotations"][INDEX])

    @property
    def node(self) -> str:
        """Name of its node; "no node" if it has none yet."""
        return self.pod["spec"].get("nodeName") or "no node"

    @property
    def runs(self) -> bool:
        """True if its worker's container is running."""
        return not self.is_gone and "running" in self._container.get("state", {})

    @property
    def is_over(self) -> bool:
        """True if it has ended, or is being deleted."""
        return self._status.get("phase") in ("Failed", "Succeeded") or self._is_deleted

    @property
    def has_cause(self) -> bool:
        """True if it is known why the pod ended, and it was not deleted."""
        if self._find_end() is not None:
            return True
        return bool(self._terminated) and not self.was_made_to_end

    @property
    def was_made_to_end(self) -> bool:
        """True if the pod was deleted while it was running."""
        return self._is_deleted and self._terminated.get("exitCode", 143) in (137, 143)

    @property
    def waits_for(self) -> str:
        """Reason why the pod is not running yet; empty if it is running or has ended."""
        if self.runs or self.is_over:
            return ""
        waiting = self._container.get("state", {}).get("waiting", {})
        if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return _say(waiting["reason"], waiting.get("message"))
        scheduled = self._condition("PodScheduled")
        if scheduled.get("status") == "False":
            return str(scheduled.get("message") or scheduled.get("reason"))
        return "its container is being created"

    @property
    def hopeless(self) -> str:
        """Advice if the pod will never run unless something changes; else empty."""
        waiting = self._container.get("state", {}).get("waiting", {})
        return _HOPELESS.get(waiting.get("reason"), "")

    def describe_end(self) -> tuple[Kind, str, str]:
        """Return the type, message and advice for the failure of its worker."""
        where = f"its pod {self.name} on {self.node}"
        found = self._find_end()
        if found is not None:
            kind, said, advice = _ENDS[found[0]]
            return kind, _say(f"{where} {said}", found[1]), advice
        ended = self._terminated
        if self.was_made_to_end:
            return (
                "Deleted",
                f"{where} was deleted",
                "find out who deleted the pod (`kubectl get events`)",
            )
        if not ended:
            message = f"{where} is {self._status.get('phase', 'Unknown')}, but does not respond"
            return "NodeLost", message, "check whether that node is still running"
        status = ended.get("exitCode")
        message = f"{where} ended without a report: status {status}"
        return "ProcessDied", _say(message, ended.get("reason")), "see the last lines of its log"

    @property
    def ended_at(self) -> float:
        """Time at which its process ended, in seconds since the epoch; now if unknown."""
        text = self._terminated.get("finishedAt")
        if not text:
            return time.time()
        return float(calendar.timegm(time.strptime(text[:19], "%Y-%m-%dT%H:%M:%S")))

    @property
    def _status(self) -> Mapping[str, Any]:
        status: Mapping[str, Any] = self.pod.get("status") or {}
        return status

    @property
    def _container(self) -> Mapping[str, Any]:
        return next(iter(self._status.get("containerStatuses") or ()), {})

    @property
    def _terminated(self) -> Mapping[str, Any]:
        ended: Mapping[str, Any] = self._container.get("state", {}).get("terminated") or {}
        return ended

    @property
    def _is_deleted(self) -> bool:
        return self.is_gone or bool(self.pod["metadata"].get("deletionTimestamp"))

    def _condition(self, kind: str) -> Mapping[str, Any]:
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
                if since and since <= one.get("lastTransitionTime", ""):
                    return deleted
                return str(one.get("reason") or "Failed"), str(one.get("message") or "")
        return "", ""

    def explain(self, pod: PodState) -> tuple[Kind, str, str]:
        """Return the same as `PodState.describe_end`, for a pod that was deleted."""
        reason, message = self.failure
        if reason == "DeadlineExceeded":
            return "TimeLimit", "the Job reached its time limit", "increase `time_limit`"
        if pod.name in message:  # the pod whose failure ended the others
            return "Disrupted", f"its pod {pod.name} was disrupted: {message}", _AGAIN
        if reason in ("", "Deleted"):
            return pod.describe_end()
        return "Stopped", "ended by Kubernetes because another worker failed", ""
