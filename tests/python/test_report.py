"""A worker's unreadable report is a failure of that worker, with its rank and host."""

from __future__ import annotations

from typing import Any

import pytest

from pybackend.core.errors import ClusterError, Failure, WorkerFailedError
from pybackend.core.job.codec import encode
from pybackend.core.job.job import FunctionJob
from pybackend.core.job.report import WorkerReport, read_metrics, read_report
from pybackend.core.launchers.remote.bundle import read_greeting
from pybackend.core.launchers.spark.stage import follow_stage
from pybackend.core.net.meeting import MeetingServer

GOOD = encode(WorkerReport(1, "b", 17, value={"loss": [1.0]}))
# Damaged reports, and the messages about them.
UNREADABLE = {
    "nothing": (None, "it is empty"),
    "cut off": (GOOD[:-20], "Unterminated string|Expecting"),
    "no text": (b"\xff\xfe\x00", "decode"),
    "of another": (GOOD.replace('"rank": 1', '"rank": 0'), "it is from worker 0"),
    "a field less": (GOOD.replace('"pid": 17, ', ""), "WorkerReport without pid"),
    "too large": (GOOD.replace('"seconds": 0.0', f'"seconds": {10**400}'), "is too large"),
    "digits": (GOOD.replace('"rows": 0', f'"rows": {"9" * 5000}'), "4300 digits"),
    "too deep": (GOOD.replace("[1.0]", "[" * 100_000), "nested too deeply"),
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_report_that_cannot_be_read_is_the_workers_failure(name: str) -> None:
    text, reason = UNREADABLE[name]
    failure = read_report(text, 1, "b").failure
    assert failure is not None
    assert (failure.rank, failure.host) == (1, "b")
    with pytest.raises(WorkerFailedError, match=f"(?s)worker 1 on b failed.*{reason}.*What to do"):
        raise WorkerFailedError([failure])


def test_spark_brings_all_reports_or_names_the_worker() -> None:
    def read(texts: dict[int, str | None]) -> list[WorkerReport]:
        with MeetingServer(None, "", 2) as server:
            crew = follow_stage(FunctionJob(2), server, print, lambda: texts, ClusterError)
            return crew.conclude()

    own = encode(WorkerReport(0, "a", 16))
    assert [report.rank for report in read({1: GOOD, 0: own})] == [0, 1]
    for text in (GOOD[:40], None):
        with pytest.raises(WorkerFailedError, match="worker 1 on its executor failed: Unreadable"):
            read({0: own, 1: text})


@pytest.mark.parametrize("value", [None, 3, {"loss": 1.0}, ["loss"]])
def test_figures_of_another_form_name_the_worker(value: Any) -> None:
    report = WorkerReport(0, "a", 16, value=value, failure=Failure(0, "a", "", ""))
    with pytest.raises(ClusterError, match=r"worker 0 on a reported .* instead of named metrics"):
        read_metrics(report, list)
    assert read_metrics(read_report(GOOD, 1, "b"), list) == {"loss": [1.0]}


@pytest.mark.parametrize(
    "said",
    ["{", "[]", "3", "null", '{"version": "3"}', '{"version": [3], "python": "p", "missing": []}'],
)
def test_a_greeting_that_makes_no_sense_names_its_host(said: str) -> None:
    with pytest.raises(ClusterError, match="node7 sent an invalid greeting"):
        read_greeting(f"tfdist {said}\n".encode(), "node7")
