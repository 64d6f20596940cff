"""Hand a checked training run over to a process of its own, which drives it."""

from __future__ import annotations

import os
import pickle
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace

from pybackend.core import launchers
from pybackend.core.api import training_hooks
from pybackend.core.api.calls import TrainingCall
from pybackend.core.api.job_copy import new_copy
from pybackend.core.api.job_folder import VARIABLE, JobFolder, JobStore, find_store, new_folder
from pybackend.core.api.observer import Observers, split_observers
from pybackend.core.api.prepared_training import PreparedTraining
from pybackend.core.data.files import naming_full_disk
from pybackend.core.data.sources import FunctionRows
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.call_options import PathOrUri
from pybackend.core.job.pickling import pickle_value
from pybackend.core.words import call_of, term

# The driver only has to start Python.
_START_SECONDS = 60.0
# Files of a request, which only the driver reads.
ROWS, REST = "rows.pickle", "rest.pickle"


def check_submission(call: TrainingCall, folder: PathOrUri | None) -> JobStore:
    """Check that a process of its own can drive a training; return the folder of all jobs."""
    root = find_store(folder)
    launcher = launchers.launcher_for(call.spark)
    if isinstance(launcher, launchers.Bound) and launcher.why_bound is not None:
        raise InputError(
            f"{call_of('submit_training', ...)} is not possible with {launcher.where}: "
            f"{launcher.why_bound}"
        )
    if split_observers(call.options["callbacks"])[0]:
        raise InputError(
            f"an {term('Observer')} runs in a session, which {call_of('submit_training', ...)} "
            f"leaves: pass it to `{call_of('attach_job', ..., callbacks=...)}`"
        )
    for hook in training_hooks():
        hook.check_submission(call)
    return root


def submit(prepared: PreparedTraining, root: JobStore) -> JobFolder:
    """Write a training run to a new folder, and start the process that drives it."""
    job, launcher = prepared.job, prepared.launcher
    if isinstance(launcher, launchers.Checking):
        launcher.check(job)
    with new_folder(root.path) as (folder, lock), _hand_over(prepared) as moved:
        folder.submit(launcher.where, job.workers, job.epochs, root.copies)
        with naming_full_disk(folder.path, "files of the job", VARIABLE):
            write_request(folder, prepared, moved)
        with new_copy(folder):
            published = _start(folder, lock, {} if moved is None else moved.variables)
    return published


def _hand_over(prepared: PreparedTraining) -> AbstractContextManager[launchers.Handover | None]:
    """Copy the Spark session of a training for the driver, if it has one."""
    launcher = prepared.launcher
    if launcher.session is None:
        return nullcontext()
    if isinstance(launcher, launchers.Describing):
        launcher.describe(prepared.job)  # its checks; the driver's errors come late
    return launchers.hand_over(launcher.session, prepared.datasets)


def _start(folder: JobFolder, lock: int, variables: Mapping[str, str]) -> JobFolder:
    """Start the driver with more variables in its environment; wait until the job exists."""
    published = folder.published
    with folder.output.open("wb") as output:
        process = subprocess.Popen(
            launchers.run_here("api.detached_driver", str(folder.path), str(lock)),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, **launchers.own_libraries(), **variables},
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


def write_request(
    folder: JobFolder, prepared: PreparedTraining, moved: launchers.Handover | None = None
) -> None:
    """Write a training run into a folder; ``moved`` replaces a Spark session and its DataFrames."""
    datasets = prepared.datasets if moved is None else moved.datasets
    folder.request.mkdir(0o700)
    folder.job.write_text(prepared.job.to_json())
    functions = {k: v for k, v in datasets.items() if isinstance(v, FunctionRows)}
    rows = {k: v for k, v in datasets.items() if k not in functions}
    # Directly to the file, since rows may be large.
    with (folder.request / ROWS).open("wb") as file:
        pickle.dump(rows, file, protocol=5)
    # A built model is in the files already.
    model = None if prepared.job.model_source == "file" else prepared.model
    sent = {
        **vars(prepared),
        "job": replace(prepared.job, verbose=0, reports_lines=True),
        "datasets": functions,
        "observers": Observers(),
        "model": model,
        "described": prepared.describe_model(),
        "launcher": prepared.launcher if moved is None else None,
    }
    owners = [*(rows.fn for rows in functions.values()), model, prepared.snapshot]
    owners = [one for one in (*owners, *prepared.custom_objects.values()) if one is not None]
    content = pickle_value((sent, moved and moved.session), "the training", owners)
    (folder.request / REST).write_bytes(content)
