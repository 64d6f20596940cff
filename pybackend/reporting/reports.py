"""Write the report of a training run."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pybackend
from pybackend.core.api.markup import PAGE
from pybackend.core.api.train_result import TrainResult
from pybackend.core.data.files import write_whole
from pybackend.core.errors import Failure, InputError, WorkerFailedError
from pybackend.core.machine.packages import BUILDS, find_version
from pybackend.core.words import show, show_time, term
from pybackend.reporting.page import (
    make_header,
    make_page,
    make_section,
    make_timeline,
    make_training_page,
)


def report(what: Any, path: str | os.PathLike[str], *, title: str | None = None) -> Path:
    """Write the report of a training run as one HTML page that works offline.

    It shows the curves of all metrics, what each worker did, the duration of its steps by part,
    failures and restarts, the model, settings and versions. It suits light and dark mode, and wide
    and narrow screens. All numbers are also in tables. For programs, the element ``tfdist-run``
    contains the JSON of `TrainResult.to_dict` without the model file, with ``rows_per_second`` for
    each worker.

    Parameters
    ----------
    what
        A `TrainResult`; or a `WorkerFailedError`, for a page with each worker's failure.
    path
        Path of the page, ``*.html``. The file is either complete or absent.
    title
        Title of the page. None (default): the model's name.

    Returns
    -------
    Path
        Path of the page.

    Raises
    ------
    InputError
        There is nothing to report, or the path does not name an HTML file or cannot be written.
    """
    target = check_page_path(path)
    if isinstance(what, WorkerFailedError):
        return _write(target, make_failure_page(what, title or "A training run that failed"))
    if not isinstance(what, TrainResult):
        raise InputError(
            f"report() needs a {term('TrainResult')} or a WorkerFailedError, not "
            f"{type(what).__name__}"
        )
    # From the record, which is all that R passes to `write_report`.
    return write_report(json.loads(what.record), _read_model(what), target, title)


def write_report(
    record: Mapping[str, Any], model: Any, path: str | os.PathLike[str], title: str | None = None
) -> Path:
    """Write the report from the record of a result, and its model or None."""
    target = check_page_path(path)
    record = {**record, "versions": record.get("versions") or _read_versions(record)}
    title = title or (f"Training of {model.name}" if model is not None else "Training")
    return _write(target, make_training_page(record, title, _summarise(model)))


def check_page_path(path: Any) -> Path:
    """Return the path of an HTML file; reject anything else before the page is built."""
    if not isinstance(path, (str, os.PathLike)):
        raise InputError(f"`path` must be the path of the page, not {show(path)}")
    target = Path(path)
    if target.suffix.lower() not in (".html", ".htm"):
        raise InputError(f"name the page *.html, not {show(target.name)}")
    return target


def _read_model(result: TrainResult) -> Any:
    """Return the model; None if it cannot be loaded here, which the page reports."""
    try:
        return result.model
    except Exception:  # custom code that is not importable here, a deleted file
        return None


def _summarise(model: Any) -> str | None:
    if model is None:
        return None
    lines: list[str] = []
    model.summary(line_length=78, print_fn=lambda text, line_break=True: lines.append(text))
    return "\n".join(lines).strip("\n")


def _read_versions(record: Mapping[str, Any]) -> dict[str, str | None]:
    """Return the versions of this process, if the record has none."""
    if (record.get("settings") or {}).get("versions"):
        return {}
    found = {"tfdist": pybackend.__version__, "python": platform.python_version()}
    return {**found, **{name: find_version(name) for name in BUILDS}}


def _write(target: Path, page: str) -> Path:
    try:
        write_whole(str(target), page.encode())
    except OSError as error:
        raise InputError(f"{target} cannot be written: {error}") from error
    return target


def make_failure_page(error: WorkerFailedError, title: str) -> str:
    """Return the page for a failed run: the first failure with its log, then all failures."""
    root = error.failures[0]
    body = [
        make_header(title, f"Written {time.strftime('%Y-%m-%d %H:%M %Z')}"),
        make_section("First failure", *_describe(root)),
        make_section("All failures", _list(error.failures)),
    ]
    timeline = [asdict(moment) for moment in error.timeline]
    if timeline:
        body.append(make_section("Timeline", make_timeline(timeline)))
    failures = [asdict(failure) for failure in error.failures]
    return make_page(title, body, {"failures": failures, "timeline": timeline})


def _describe(failure: Failure) -> Iterator[str]:
    yield PAGE.text(f"Worker {failure.rank} on {failure.host}: {failure.exception_type}", "bad")
    yield PAGE.text(failure.message)
    if failure.advice:
        yield PAGE.text(f"What to do: {failure.advice}")
    if failure.traceback:
        yield PAGE.text("Traceback", tag="h3") + PAGE.code(failure.traceback.rstrip())
    if failure.log:
        yield PAGE.text("Last lines printed", tag="h3") + PAGE.code("\n".join(failure.log))


def _list(failures: list[Failure]) -> str:
    rows = [[one.rank, one.host, _when(one), one.exception_type, one.message] for one in failures]
    columns = ["worker", "host", "when", "kind", "reason"]
    return PAGE.table(columns, rows, "By time; consequences of other failures last", "failures")


def _when(failure: Failure) -> str:
    return show_time(failure.time) if failure.time else "–"
