"""Hand a checked training run over to a process of its own."""

from __future__ import annotations

import os
import pickle
import subprocess
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pybackend.api.calls import TrainingCall
from pybackend.api.detached_job import DetachedJob
from pybackend.api.job_folder import JobFolder, new_folder
from pybackend.api.observer import Observers, split_observers
from pybackend.api.prepared_training import PreparedTraining
from pybackend.api.request import Request
from pybackend.api.scaled import VARIABLE as BENCH
from pybackend.data.disk import naming_full_disk
from pybackend.data.sources import FunctionRows
from pybackend.errors import ClusterError, InputError
from pybackend.job.job import Job, TrainingJob
from pybackend.job.pickling import pickle_value
from pybackend.launchers import Bound, Checking, launcher_for, own_libraries, run_here
from pybackend.words import call_of, setting, term

# The driver only has to start Python.
_START_SECONDS = 60.0


def check_detachable(call: TrainingCall) -> None:
    """Reject a call whose workers or observers belong to this session.

    Raises
    ------
    InputError
        The message names the reason, and what to do instead.
    """
    launcher = launcher_for(call.spark)
    if isinstance(launcher, Bound):
        raise InputError(
            f"{setting(detach=True)} is not possible with {launcher.where}: {launcher.why_bound}"
        )
    if split_observers(call.callbacks)[0]:
        raise InputError(
            f"an {term('Observer')} runs in a session, which {setting(detach=True)} leaves: pass "
            f"it to `{call_of('attach_job', ..., callbacks=...)}`"
        )
    if BENCH in os.environ:
        raise InputError(f"bench-scale waits for the training: leave out {setting(detach=True)}")


def submit(prepared: PreparedTraining, began: float, root: Path) -> DetachedJob:
    """Write a training run to a new folder, and start the process that drives it."""
    job, launcher = prepared.request.job, prepared.launcher
    if isinstance(launcher, Checking):
        launcher.check(job)
    with new_folder(root) as (folder, lock):
        folder.submit(launcher.where, job.workers, job.epochs)
        with naming_full_disk(folder.path, "the job"):
            write_request(folder, prepared, began)
        published = _start(folder, lock)
    return DetachedJob(published)


def _start(folder: JobFolder, lock: int) -> JobFolder:
    """Start the driver, and wait until the job exists."""
    published = folder.published
    with folder.output.open("wb") as output:
        process = subprocess.Popen(
            run_here("api.detached_driver", str(folder.path), str(lock)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **own_libraries()},
            pass_fds=[lock],
            start_new_session=True,  # not ended with the terminal, nor by its Ctrl-C
        )
    # If it ends before this session, it must not remain as a zombie.
    threading.Thread(target=process.wait, daemon=True).start()
    deadline = time.monotonic() + _START_SECONDS
    while not published.path.exists():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            process.wait()
            said = folder.output.read_text(errors="replace").strip() or "it printed nothing"
            raise ClusterError(f"the process that drives the job did not start: {said}")
        time.sleep(0.02)
    return published


@dataclass(frozen=True)
class _Parts:
    """Files of a request, which only the driver reads."""

    folder: JobFolder

    @property
    def rows(self) -> Path:
        return self.folder.request / "rows.pickle"

    @property
    def rest(self) -> Path:
        return self.folder.request / "rest.pickle"


def write_request(folder: JobFolder, prepared: PreparedTraining, began: float) -> None:
    """Write a training run into a folder."""
    request, files = prepared.request, _Parts(folder)
    folder.request.mkdir(0o700)
    folder.job.write_text(request.job.to_json())
    functions = {k: v for k, v in request.datasets.items() if isinstance(v, FunctionRows)}
    rows = {k: v for k, v in request.datasets.items() if k not in functions}
    # Directly to the file, since rows may be large.
    with files.rows.open("wb") as file:
        pickle.dump(rows, file, protocol=5)
    # A built model is in the files already.
    model = None if request.job.model_source == "file" else request.model
    rest: Mapping[str, Any] = {
        "launcher": prepared.launcher,
        "restarts": prepared.restarts,
        "trackers": prepared.trackers,
        "began": began,
        "files": request.files,
        "functions": functions,
        "columns": request.columns,
        "model": model,
        "custom_objects": request.custom_objects,
        "snapshot": request.snapshot,
    }
    owners = [*(rows.fn for rows in functions.values()), model, request.snapshot]
    owners += request.custom_objects.values()
    content = pickle_value(rest, "the training", [one for one in owners if one is not None])
    files.rest.write_bytes(content)


def read_request(folder: JobFolder) -> tuple[PreparedTraining, float]:
    """Read what `write_request` wrote, which only this user can have changed."""
    folder.check_private()
    files = _Parts(folder)
    with files.rows.open("rb") as file:
        datasets = pickle.load(file)  # noqa: S301
    rest = pickle.loads(files.rest.read_bytes())  # noqa: S301
    job = Job.from_json(folder.job.read_text())
    assert isinstance(job, TrainingJob)
    request = Request(
        job=replace(job, verbose=0, reports_lines=True),
        files=rest["files"],
        datasets={**datasets, **rest["functions"]},
        columns=rest["columns"],
        model=rest["model"],
        custom_objects=rest["custom_objects"],
        snapshot=rest["snapshot"],
        observers=Observers(),
    )
    prepared = PreparedTraining(request, rest["launcher"], rest["restarts"], rest["trackers"])
    return prepared, rest["began"]
