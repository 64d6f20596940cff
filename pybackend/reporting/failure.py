"""The page of a training that has failed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict

from pybackend.errors import Failure, WorkerFailedError
from pybackend.reporting.html import (
    make_code,
    make_header,
    make_page,
    make_section,
    make_table,
    make_text,
)


def make_failure_page(error: WorkerFailedError, title: str) -> str:
    """Which worker failed first, why, and what it printed last; the others below."""
    root = error.failures[0]
    body = [
        make_header(title, f"Written {time.strftime('%Y-%m-%d %H:%M %Z')}"),
        make_section("The failure that came first", *_describe(root)),
        make_section("All failures", _list(error.failures)),
    ]
    return make_page(title, body, {"failures": [asdict(failure) for failure in error.failures]})


def _describe(failure: Failure) -> Iterator[str]:
    yield make_text(f"Worker {failure.rank} on {failure.host}: {failure.exception_type}", "bad")
    yield make_text(failure.message)
    if failure.advice:
        yield make_text(f"What to do: {failure.advice}")
    if failure.traceback:
        yield f"<h3>Traceback</h3>{make_code(failure.traceback.rstrip())}"
    if failure.log:
        yield f"<h3>The last lines that it printed</h3>{make_code(chr(10).join(failure.log))}"


def _list(failures: list[Failure]) -> str:
    rows = [[one.rank, one.host, _when(one), one.exception_type, one.message] for one in failures]
    columns = ["worker", "host", "when", "kind", "reason"]
    return make_table("In order of time, consequences last", columns, rows, "failures")


def _when(failure: Failure) -> str:
    shown = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(failure.time))
    return shown if failure.time else "–"
