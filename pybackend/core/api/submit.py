"""Hand a checked training run over to a process of its own."""

from __future__ import annotations

import os
import pickle
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pybackend.core.api.calls import TrainingCall
from pybackend.core.api.detached_job import DetachedJob
from pybackend.core.api.job_copy import new_copy
from pybackend.core.api.job_folder import VARIABLE, JobFolder, Root, find_root, new_folder
from pybackend.core.api.observer import Observers, split_observers
from pybackend.core.api.prepared_training import PreparedTraining
from pybackend.core.api.request import Request
from pybackend.core.api.scaled import VARIABLE as BENCH
from pybackend.core.data.files import naming_full_disk
from pybackend.core.data.sources import FunctionRows
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.call_options import Place
from pybackend.core.job.job import Job, TrainingJob
from pybackend.core.job.pickling import pickle_value
from pybackend.core.launchers import (
    Bound,
    Checking,
    Describing,
    launcher_for,
    own_libraries,
    run_here,
)
from pybackend.core.words import call_of, term

if TYPE_CHECKING:
    from pybackend.core.launchers import Handover

# The driver only has to start Python.
_START_SECONDS = 60.0


def check_submission(call: TrainingCall, folder: Place | None) -> Root:
    """Check that a process of its own can drive a training; return the folder of all jobs.

    Raises
    ------
    InputError
        The folder is not a path, or workers or observers belong to this session.
    """
    root = find_root(folder)
    launcher = launcher_for(call.spark)
    if isinstance(launcher, Bound) and launcher.why_bound is not None:
        raise InputError(
            f"{call_of('submit_training', ...)} is not possible with {launcher.where}: "
            f"{launcher.why_bound}"
        )
    if split_observers(call.options["callbacks"])[0]:
        raise InputError(
            f"an {term('Observer')} runs in a session, which {call_of('submit_training', ...)} "
            f"leaves: pass it to `{call_of('attach_job', ..., callbacks=...)}`"
        )
    if BENCH in os.environ:
        raise InputError(
            f"bench-scale waits for the training: call {call_of('barrier_train', ...)}"
        )
    return root


def submit(prepared: PreparedTraining, began: float, root: Root) -> DetachedJob:
    """Write a training run to a new folder, and start the process that drives it."""
    job, launcher = prepared.request.job, prepared.launcher
    if isinstance(launcher, Checking):
        launcher.check(job)
    with new_folder(root.path) as (folder, lock), _hand_over(prepared) as moved:
        folder.submit(launcher.where, job.workers, job.epochs, root.copies)
        with naming_full_disk(folder.path, "files of the job", VARIABLE):
            write_request(folder, prepared, began, moved)
        with new_copy(folder):
            published = _start(folder, lock, {} if moved is None else moved.variables)
    return DetachedJob(published)


def _hand_over(prepared: PreparedTraining) -> AbstractContextManager[Handover | None]:
    """Copy the Spark session of a training for the driver, if it has one."""
    launcher = prepared.launcher
    if launcher.session is None:
        return nullcontext()
    from pybackend.core.launchers import hand_over

    if isinstance(launcher, Describing):
        launcher.describe(prepared.request.job)  # its checks; the driver's errors come late
    return hand_over(launcher.session, prepared.request.datasets)


def _start(folder: JobFolder, lock: int, variables: Mapping[str, str]) -> JobFolder:
    """Start the driver with more variables in its environment; wait until the job exists."""
    published = folder.published
    with folder.output.open("wb") as output:
        process = subprocess.Popen(
            run_here("api.detached_driver", str(folder.path), str(lock)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **own_libraries(), **variables},
            pass_fds=[lock],
            start_new_session=True,  # not ended with the terminal, nor by its Ctrl-C
        )
    try:
        # If it ends before this session, it must not remain as a zombie.
        threading.Thread(target=process.wait, daemon=True).start()
        deadline = time.monotonic() + _START_SECONDS
        while not published.path.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                said = folder.output.read_text(errors="replace").strip() or "it printed nothing"
                raise ClusterError(f"the process that drives the job did not start: {said}")
            time.sleep(0.02)
    except BaseException:  # also Ctrl-C
        process.kill()
        process.wait()
        with suppress(FileNotFoundError):
            published.remove()
        raise
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


def write_request(
    folder: JobFolder, prepared: PreparedTraining, began: float, moved: Handover | None = None
) -> None:
    """Write a training run into a folder; ``moved`` replaces a Spark session and its DataFrames."""
    request, files = prepared.request, _Parts(folder)
    datasets = request.datasets if moved is None else moved.datasets
    folder.request.mkdir(0o700)
    folder.job.write_text(request.job.to_json())
    functions = {k: v for k, v in datasets.items() if isinstance(v, FunctionRows)}
    rows = {k: v for k, v in datasets.items() if k not in functions}
    # Directly to the file, since rows may be large.
    with files.rows.open("wb") as file:
        pickle.dump(rows, file, protocol=5)
    # A built model is in the files already.
    model = None if request.job.model_source == "file" else request.model
    rest: Mapping[str, Any] = {
        "launcher": prepared.launcher if moved is None else None,
        "session": None if moved is None else moved.session,
        "recovery": prepared.recovery,
        "settings": prepared.settings,
        "trackers": prepared.trackers,
        "began": began,
        "files": request.files,
        "functions": functions,
        "columns": request.columns,
        "model": model,
        "described": request.describe_model(),
        "custom_objects": request.custom_objects,
        "snapshot": request.snapshot,
    }
    owners = [*(rows.fn for rows in functions.values()), model, request.snapshot]
    owners += request.custom_objects.values()
    content = pickle_value(rest, "the training", [one for one in owners if one is not None])
    files.rest.write_bytes(content)


@contextmanager
def opened_request(folder: JobFolder) -> Iterator[tuple[PreparedTraining, float]]:
    """Read what `write_request` wrote, which only this user can have changed.

    Yields
    ------
    tuple
        The training, whose Spark session ends after the block, and when the call began.
    """
    folder.check_private()
    files = _Parts(folder)
    with files.rows.open("rb") as file:
        datasets = pickle.load(file)  # noqa: S301
    rest = pickle.loads(files.rest.read_bytes())  # noqa: S301
    job = Job.from_json(folder.job.read_text())
    assert isinstance(job, TrainingJob)
    with ExitStack() as stack:
        launcher, datasets = rest["launcher"], {**datasets, **rest["functions"]}
        if rest["session"] is not None:
            session, datasets = stack.enter_context(rest["session"].connect(datasets))
            launcher = launcher_for(session)
        request = Request(
            job=replace(job, verbose=0, reports_lines=True),
            files=rest["files"],
            datasets=datasets,
            columns=rest["columns"],
            model=rest["model"],
            custom_objects=rest["custom_objects"],
            snapshot=rest["snapshot"],
            observers=Observers(),
            described=rest["described"],
        )
        parts = (rest[name] for name in ("recovery", "settings", "trackers"))
        yield PreparedTraining(request, launcher, *parts), rest["began"]
