"""Report a failed task: to the driver, and in the exception that makes Spark stop the others.

This file is imported on the executors and by the driver.
"""

from __future__ import annotations

import base64
import re
import time
from contextlib import suppress
from typing import NoReturn

from pybackend.errors import Failure
from pybackend.job.codec import decode, encode
from pybackend.job.messages import Emit, Failed

# Replaced by the driver with the host that the worker reported.
UNKNOWN_HOST = "its executor"
# Encloses an encoded failure in an exception's message.
_MARK = "~tfdist~"
_CAUSE_FIRST_SECONDS = 2.0
# A barrier stage's failure as Spark reports it; the number of the result's partition is the rank.
_EXECUTOR_LOST = re.compile(
    r"barrier task ResultTask\(\d+, (\d+)\).*\s+ExecutorLostFailure \(executor (\S+) exited "
    r"[^)]*\)(?: Reason: (.*))?"
)
_TASK_LOST = re.compile(
    r"barrier task ResultTask\(\d+, (\d+)\) finished unsuccessfully\.\s+"
    r"\S+: Python worker exited unexpectedly"
)


def fail_task(failure: Failure, emit: Emit) -> NoReturn:
    """Send the driver a worker's failure, and fail the task, so that Spark stops the other tasks.

    Parameters
    ----------
    emit
        Returns whether the event was sent; if not, the exception's message contains the failure.

    Raises
    ------
    RuntimeError
        Always.
    """
    is_sent = emit(Failed(failure))
    if failure.is_consequence:
        # The cause should end the Spark job and be in its message, which the driver reads.
        time.sleep(_CAUSE_FIRST_SECONDS)
    message = f"worker {failure.rank}: {failure.exception_type}: {failure.message}"
    if not is_sent:
        text = base64.b64encode(encode(failure).encode()).decode()
        message = f"{message} {_MARK}{text}{_MARK}"
    raise RuntimeError(message)


def find_failures(message: str) -> list[Failure]:
    """Return the failures that `fail_task`, or Spark, wrote into the message of Spark's error."""
    texts = dict.fromkeys(re.findall(f"{_MARK}([A-Za-z0-9+/=]+){_MARK}", message))
    sent = []
    for text in texts:
        with suppress(ValueError):  # then Spark's own text remains
            sent.append(decode(base64.b64decode(text), Failure))
    executors = [_describe_loss(*found) for found in _EXECUTOR_LOST.findall(message)[:1]]
    return sent + executors + [_describe_end(rank) for rank in _TASK_LOST.findall(message)[:1]]


def _describe_loss(rank: str, executor: str, reason: str) -> Failure:
    """Return the failure for a lost executor: other workers only see a closed connection."""
    return Failure(
        int(rank),
        f"executor {executor}",
        exception_type="ExecutorLost",
        message=f"Spark lost executor {executor}, in which the worker ran "
        f"({reason[:200] or 'no reason given'})",
        time=time.time(),
        advice=(
            "see that executor's log in Spark's web interface. Exit code 137 usually means that "
            "memory ran out: raise spark.executor.memoryOverhead, or lower batch_size"
        ),
    )


def _describe_end(rank: str) -> Failure:
    """Return the failure for a task whose Python was killed and could not report that."""
    return Failure(
        int(rank),
        UNKNOWN_HOST,
        exception_type="ProcessDied",
        message="the Python process of Spark's task, which supervised the worker, was killed, or "
        "crashed",
        time=time.time(),
        advice="check whether that host ran out of memory, or whether something kills processes "
        "there: lower batch_size, or raise spark.executor.memoryOverhead",
    )
