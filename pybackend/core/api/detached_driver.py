"""The process that drives a detached training run.

It makes the ordinary call, independently of the session that submitted it. Its events, and the
result or the error, go into the job's folder.
"""

from __future__ import annotations

import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from pybackend.core import launchers
from pybackend.core.api.job_copy import copied
from pybackend.core.api.job_folder import (
    VARIABLE,
    EventLog,
    JobFolder,
)
from pybackend.core.api.job_record import BEAT_SECONDS, describe_error
from pybackend.core.api.observer import Observer, Observers
from pybackend.core.api.prepared_training import PreparedTraining
from pybackend.core.api.submit import REST, ROWS
from pybackend.core.api.train_result import TrainResult
from pybackend.core.api.training_run import run_prepared
from pybackend.core.data.files import naming_full_disk
from pybackend.core.errors import ClusterError, TfdistError
from pybackend.core.words import either, show, speak

_LOOK_SECONDS = 0.2
# A folder may be moved, and replaced by a link.
_GONE_SECONDS = 30.0


@contextmanager
def opened_request(folder: JobFolder) -> Iterator[PreparedTraining]:
    """Read what `write_request` wrote, which only this user can have changed.

    Yields the training, whose Spark session ends after the block.
    """
    folder.check_private()
    with (folder.request / ROWS).open("rb") as file:
        datasets = pickle.load(file)  # noqa: S301
    sent, session = pickle.loads((folder.request / REST).read_bytes())  # noqa: S301
    sent["datasets"] = {**datasets, **sent["datasets"]}
    with ExitStack() as stack:
        if session is not None:
            spark, sent["datasets"] = stack.enter_context(session.connect(sent["datasets"]))
            sent["launcher"] = launchers.launcher_for(spark)
        yield PreparedTraining(**sent)


def main(path: str, lock: str) -> None:
    """Drive the job in a folder; ``lock`` is the descriptor of its lock."""
    # Workers that inherited the lock would hold it after this process: the job would seem to run.
    os.set_inheritable(int(lock), False)
    # A shell starts background jobs with Ctrl-C ignored; here it is how a job is cancelled.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    folder = JobFolder(Path(path))
    speak(folder.submitted.language)
    folder = folder.publish()
    with copied(folder):
        _drive(folder)


def _drive(folder: JobFolder) -> None:
    """Run the training, and write its end."""
    try:
        with _watched(folder), opened_request(folder) as prepared:
            _train(folder, prepared)
    except KeyboardInterrupt:
        folder.end("cancelled")
    except TfdistError as error:
        folder.end("failed", describe_error(error))
    except BaseException as error:
        unknown = f"the process that drives the job failed: {type(error).__name__}: {error}"
        folder.end("failed", describe_error(ClusterError(f"{unknown} (see {folder.output})")))
        raise
    else:
        folder.end("finished")


def _train(folder: JobFolder, prepared: PreparedTraining) -> None:
    def is_asked(number: int, logs: object) -> bool:
        return folder.is_asked("stop")

    # Observers run in the sessions that attach, and ask this one to stop the training.
    ask = Observer(is_asked, None if prepared.job.is_asynchronous else is_asked)
    log = EventLog(folder)
    result = run_prepared(replace(prepared, observers=Observers([ask])), log, log)
    verbose = folder.read_job().verbose
    decode = result.decode and replace(result.decode, verbose=verbose)  # type: ignore[type-var]
    folder.free()  # before: the result may need its space
    _write(folder, result, decode)


def _write(folder: JobFolder, result: TrainResult, decode: object) -> None:
    """Write a result to the job's folder, or at least to another disk."""
    try:
        with naming_full_disk(folder.path, "files of the result", VARIABLE):
            folder.decoder.write_bytes(pickle.dumps(decode))
            result.save(folder.result)
    except (OSError, TfdistError) as error:
        with suppress(OSError):
            folder.decoder.unlink()  # for the end of the job
        reason = getattr(error, "strerror", None) or error
        raise ClusterError(
            f"training has ended, but its result could not be written to {folder.path}: {reason}. "
            f"{_rescue(folder, result)}"
        ) from error


def _rescue(folder: JobFolder, result: TrainResult) -> str:
    """Write a result to a new folder elsewhere on this machine, and return where it is."""
    tried = [tempfile.gettempdir(), "/dev/shm"]  # noqa: S108  a disk of its own in containers
    for parent in tried:
        made = None
        try:
            made = tempfile.mkdtemp(prefix=f"tfdist-{folder.id}-", dir=parent)
            path = show(str(result.save(Path(made, folder.result.name))))
        except (OSError, TfdistError):
            if made is not None:
                shutil.rmtree(made, ignore_errors=True)
            continue
        read = either(f"TrainResult.load({path})", f"read_fit({path})")
        return f"The result is in {path} on {socket.gethostname()}: read it there with {read}"
    return f"The result could not be written to {' or '.join(tried)}, either"


@contextmanager
def _watched(folder: JobFolder) -> Iterator[None]:
    """Show that this process runs; interrupt the block, as with Ctrl-C, if the job is cancelled.

    Without its folder, a job cannot be found, cancelled or give its result. So this ends it, too.
    """
    has_ended = threading.Event()
    # Without it, the interrupt could come after the block, and end what writes the result.
    guard = threading.Lock()

    def look() -> None:
        last, seen = 0.0, time.monotonic()
        while not has_ended.wait(_LOOK_SECONDS):
            if time.monotonic() - last > BEAT_SECONDS:
                folder.beat()
                last = time.monotonic()
            if not folder.is_gone:
                seen = time.monotonic()
            is_deleted = time.monotonic() - seen > _GONE_SECONDS
            with guard:
                if (is_deleted or folder.is_asked("cancel")) and not has_ended.is_set():
                    has_ended.set()
                    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    watch = threading.Thread(target=look, daemon=True)
    watch.start()
    try:
        yield
    finally:
        with guard:
            has_ended.set()


if __name__ == "__main__":
    main(*sys.argv[1:])
