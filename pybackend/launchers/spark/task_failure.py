"""How a failing task says why: to the driver, and in the exception by which Spark ends the others.

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

# Until the driver, whom the members have told theirs, puts it there.
UNKNOWN_HOST = "its executor"
# Encloses a failure's description in an exception's message.
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
    """Send the driver a worker's failure, and fail the task: Spark then ends those that still run.

    Parameters
    ----------
    emit
        Returns whether the event went out; if not, the exception's message carries the failure.

    Raises
    ------
    RuntimeError
        Always.
    """
    is_sent = emit(Failed(failure))
    if failure.is_consequence:
        # The cause is to be what ends the Spark job, and what the driver reads in its message.
        time.sleep(_CAUSE_FIRST_SECONDS)
    message = f"worker {failure.rank}: {failure.exception_type}: {failure.message}"
    if not is_sent:
        text = base64.b64encode(encode(failure).encode()).decode()
        message = f"{message} {_MARK}{text}{_MARK}"
    raise RuntimeError(message)


def find_failures(message: str) -> list[Failure]:
    """Failures that `fail_task` wrote into the message of Spark's own exception, or Spark did."""
    texts = dict.fromkeys(re.findall(f"{_MARK}([A-Za-z0-9+/=]+){_MARK}", message))
    sent = []
    for text in texts:
        with suppress(ValueError):  # Spark's own words are left
            sent.append(decode(base64.b64decode(text), Failure))
    executors = [_describe_loss(*found) for found in _EXECUTOR_LOST.findall(message)[:1]]
    return sent + executors + [_describe_end(rank) for rank in _TASK_LOST.findall(message)[:1]]


def _describe_loss(rank: str, executor: str, reason: str) -> Failure:
    """Other workers only see that a connection closed: Spark knows that an executor is gone."""
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
    """Nor can a task whose Python was killed say so."""
    return Failure(
        int(rank),
        UNKNOWN_HOST,
        exception_type="ProcessDied",
        message="the Python process of Spark's task, which looked after the worker, was killed, or "
        "crashed",
        time=time.time(),
        advice="see whether memory ran out on that host, or somebody ends processes there: lower "
        "batch_size, or raise spark.executor.memoryOverhead",
    )
