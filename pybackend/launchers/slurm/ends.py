"""Why Slurm has ended a job, in words."""

from __future__ import annotations

from pybackend.errors import ClusterError
from pybackend.job.notice import RESTARTS
from pybackend.launchers.slurm.queue import JobState, lost_nodes

_CAUSES = {
    "BOOT_FAIL": ("NodeFailed", "a node of the job did not boot", "start again"),
    "CANCELLED": ("Cancelled", "the job was cancelled", "ask who has cancelled it (scancel)"),
    "DEADLINE": ("TimeLimit", "the job's deadline has passed", "give it a later one"),
    "NODE_FAIL": ("NodeFailed", "a node of the job has failed", "start again"),
    "OUT_OF_MEMORY": (
        "OutOfMemory",
        "the job used more memory than it may",
        "give it more, as in resources=Resources(memory='8GB'), or lower batch_size",
    ),
    "PREEMPTED": (
        "Preempted",
        "the job gave way to one of higher priority",
        "start again, or use a partition whose jobs are not preempted",
    ),
    "TIMEOUT": ("TimeLimit", "the job has reached its time limit", "give slurm() more `time`"),
}


def describe_end(state: JobState, host: str, said: str | None) -> tuple[str, str, str]:
    """The end of a worker that did not report, as the type, message and advice of a failure.

    Parameters
    ----------
    state
        Of the job.
    host
        Of the worker.
    said
        What srun has said of its task, if it failed first.
    """
    if state.is_preempted:
        return _CAUSES["PREEMPTED"]
    if state.state in _CAUSES:
        return _CAUSES[state.state]
    if _is_lost(state, host):
        return "NodeFailed", "its node does not answer Slurm any more", "start again"
    message = f"its task ended without a report: {said or state.state.lower()}"
    return "ProcessDied", message, "see the last lines of its log"


def describe_notice(state: JobState, notice_seconds: float) -> tuple[str, str, str] | None:
    """Why the workers of a job were told to end, as `describe_end`; None if Slurm does not know.

    Parameters
    ----------
    notice_seconds
        How long before the end of its time the job may be told so.
    """
    is_late = state.seconds_left < notice_seconds
    cause = "PREEMPTED" if state.is_preempted else "TIMEOUT" if is_late else state.state
    if cause not in _CAUSES:
        return None
    kind, message, advice = _CAUSES[cause]
    return kind, message, advice if cause == "CANCELLED" else f"{advice}; {RESTARTS}"


def _is_lost(state: JobState, host: str) -> bool:
    try:
        return host in lost_nodes(state.nodes)
    except ClusterError:  # Slurm's controller is gone as well
        return False
