"""Detached training runs: look at them, wait for them, and get their results, from any session."""

from __future__ import annotations

import math
import socket
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from pybackend.core.api.calls import hide_frames
from pybackend.core.api.display import Display, Narrator, choose_display, describe_start
from pybackend.core.api.job_copy import JobCopy, list_jobs
from pybackend.core.api.job_folder import JobFolder, find_store
from pybackend.core.api.job_record import (
    BEAT_SECONDS,
    LOST_SECONDS,
    Status,
    next_step,
    restore_error,
)
from pybackend.core.api.observer import Observer, Observers, split_observers
from pybackend.core.api.train_result import TrainResult
from pybackend.core.data.files import hide_password
from pybackend.core.errors import ClusterError, InputError, SerializationError
from pybackend.core.job.arguments import counted
from pybackend.core.job.call_options import PathOrUri
from pybackend.core.job.messages import EpochEnded, Event, Note, PrintedLine, StopTraining
from pybackend.core.words import Code, call_of, either, show

_END_SECONDS = 60.0
_SUBMITTED = ("host", "where", "workers", "epochs")
# A driver that completes the copy of its job needs the folder.
_COPY_SECONDS = 30.0
# A driver on a machine with another clock may look lost at first.
_WATCH_SECONDS = 3 * BEAT_SECONDS
_Patiently = Callable[[Callable[[], Any]], Any]


class DetachedJob:
    """A training run that a process of its own drives.

    `submit_training` and `attach_job` return it. Its ``id`` stays valid in other
    sessions and languages.

    Attributes
    ----------
    id
        Name of the job, and of its folder.
    """

    def __init__(self, folder: JobFolder | JobCopy, observers: Sequence[Observer] = ()) -> None:
        self.id = folder.id
        self._folder = folder
        self._observers = Observers(observers)
        # Observers see what happens from now on.
        self._observed = folder.read_events(0)[1] if observers else 0
        self._shown = 0

    def __repr__(self) -> str:
        return f"<job {self.id}: {self.describe()}>"

    @property
    def folder(self) -> str:
        """Path of the job's folder, or URI of its copy."""
        return self._folder.place

    @property
    def status(self) -> Status:
        """Status of the job, in a word.

        ``"running"``, ``"finished"``, ``"failed"``, ``"cancelled"``, ``"lost"`` or
        ``"unreadable"``. Lost: the process that drove the job was killed, or its machine restarted.
        The workers ended with it. Unreadable: a file of the job is damaged, or the folder is not
        yours; `describe` returns the reason.
        """
        return self._look()[0]

    def _look(self) -> tuple[Status, str]:
        """Return the status, and the reason if it is ``"unreadable"``."""
        self._check_exists()
        try:
            return self._folder.status, ""
        except (InputError, SerializationError) as error:
            return "unreadable", str(error)

    def _watch(self, deadline: float | None = None) -> Status:
        """Return the status; if a job looks lost, watch first whether its driver still beats."""
        end = min(time.monotonic() + _WATCH_SECONDS, deadline or math.inf)
        while (status := self.status) == "lost":
            if self._folder.watched_seconds >= _WATCH_SECONDS or time.monotonic() >= end:
                break
            time.sleep(self._folder.look_seconds)
        return status

    def describe(self) -> str:
        """Return the status and the progress in a line."""
        status, reason = self._look()
        if reason:
            return f"{status}: {reason}"
        record, ended = self._folder.submitted, self._folder.ended
        if ended is not None and ended.error is not None:
            return f"{status}: {ended.error.message.partition(chr(10))[0]}"
        if status == "lost":
            return f"{status}: {next_step(record)}"
        events = self._folder.read_events(0)[0]
        done = max((one.epoch for one in events if isinstance(one, EpochEnded)), default=0)
        where = f"{counted(record.workers, 'worker')}, {record.where}, driven on {record.host}"
        return f"{status}, epoch {done}/{record.epochs} completed ({where})"

    def to_dict(self) -> dict[str, Any]:
        """Return the job as plain data; ``submitted`` is in seconds since 1970.

        What only the files of an unreadable job contain is None.
        """
        status = self.status
        record = None if status == "unreadable" else self._folder.submitted
        return {
            "id": self.id,
            "status": status,
            "submitted": record and record.time,
            **{name: record and getattr(record, name) for name in _SUBMITTED},
            "folder": self.folder,
        }

    def logs(self, start: int = 0) -> list[str]:
        """Return what happened, a line each: epochs, notes, and all that the workers printed.

        Parameters
        ----------
        start
            Number of lines to leave out.
        """
        self._check_exists()
        lines: list[str] = []
        show_event = Narrator(Display(True, lines.append), logs=False)
        for event in self._folder.read_events(0)[0]:
            show_event(event)
        return lines[start:]

    def wait(self, timeout: float | None = None, *, verbose: int | None = None) -> Status:
        """Wait until the job has ended, show its progress, and return its status.

        Of the epochs that have ended before, it shows the last one; `logs` returns all. Ctrl-C only
        ends the waiting.

        Parameters
        ----------
        timeout
            Seconds to wait at most. None (default): any time.
        verbose
            As in `barrier_train`. None (default): as in the call that submitted the job.
        """
        self._check_exists()
        deadline = None if timeout is None else time.monotonic() + timeout
        patiently = partial(_call_patiently, self._folder.look_seconds, deadline)
        status: Status = patiently(lambda: self._watch(deadline))
        if status == "unreadable":
            return status
        job = self._folder.read_job()
        job = job if verbose is None else replace(job, verbose=verbose)
        display = choose_display(job)
        narrate = Narrator(display)
        try:
            with display:
                # First: then the log is complete.
                status = patiently(lambda: self.status)
                if self._shown == 0 and status == "running":
                    display.begin(describe_start(self._folder.submitted, job), job)
                is_past = True
                while True:
                    self._follow(narrate, patiently, is_past)
                    is_past = False
                    if status != "running" or (deadline and time.monotonic() > deadline):
                        display.ended(status)
                        return status
                    time.sleep(self._folder.look_seconds)
                    status = patiently(lambda: self.status)
        except KeyboardInterrupt:
            again = call_of("attach_job", Code(show(self.id)))
            end = either(".cancel()", "job_cancel()")
            text = f"the job goes on: {again} finds it again, and {end} ends it"
            print(text, file=sys.stderr)
            raise

    def _follow(self, narrate: Narrator, patiently: _Patiently, is_past: bool) -> None:
        read = self._folder.read_events
        events, self._shown = patiently(partial(read, self._shown))
        for event in _select_past(events) if is_past else events:
            narrate(event)
        if not self._observers or self._shown <= self._observed:
            return
        seen, self._observed = patiently(partial(read, self._observed))
        for event in seen:
            if isinstance(self._observers(event), StopTraining):
                patiently(lambda: self._folder.ask("stop"))

    @hide_frames
    def result(self, timeout: float | None = None, *, verbose: int | None = None) -> TrainResult:
        """Wait for the result, and return it, or raise the error with which training ended.

        Parameters
        ----------
        timeout, verbose
            As in `wait`.

        Raises
        ------
        TimeoutError
            The job has not ended in time. It goes on.
        ClusterError
            The job was cancelled or lost, or the cluster could not run it.
        SerializationError
            A file of the job is damaged.
        TfdistError
            The error that `barrier_train` raises.
        """
        status = self.wait(timeout, verbose=verbose)
        if status == "unreadable":
            raise SerializationError(f"the job {self.id} cannot be read: {self._look()[1]}")
        if status == "running":
            raise TimeoutError(f"the job {self.id} has not ended after {timeout:g} seconds")
        if status == "lost":
            raise ClusterError(f"the job {self.id} is lost: {next_step(self._folder.submitted)}")
        if status == "cancelled":
            raise ClusterError(f"the job {self.id} was cancelled, and has no result")
        ended = self._folder.ended
        if ended is not None and ended.error is not None:
            raise restore_error(ended.error)
        return self._folder.load_result(TrainResult.load)

    def cancel(self, timeout: float = _END_SECONDS) -> Status:
        """End the job and its workers, and return its status; its folder stays until `remove`.

        Parameters
        ----------
        timeout
            Seconds to wait for the end.

        Raises
        ------
        ClusterError
            The job has not ended in time.
        """
        if self._is_running():
            self._folder.ask("cancel")
        deadline = time.monotonic() + timeout
        while self._is_running():
            if time.monotonic() > deadline:
                host = self.to_dict()["host"]
                raise ClusterError(
                    f"the job {self.id} has not ended after {timeout:g} seconds; it ends when its "
                    f"driver{f' on {host}' if host else ''} notices"
                )
            time.sleep(self._folder.look_seconds)
        return self.status

    def _is_running(self) -> bool:
        """Return whether the job is running, even if it cannot be read."""
        status = self._watch()
        return status == "running" or (status == "unreadable" and self._folder.may_run())

    def _is_locked(self) -> bool:
        """Return whether a process of this machine holds the job's lock."""
        with suppress(SerializationError):
            return isinstance(self._folder, JobFolder) and self._folder.is_locked()
        return False

    def remove(self) -> None:
        """Remove the folder of a job that has ended, with its result.

        Raises
        ------
        InputError
            The job is running, or belongs to another user.
        ClusterError
            Its driver is still copying it to a URI after half a minute, or the folder cannot be
            removed.
        """
        if self._is_running():
            if self.status == "unreadable" and not self._is_locked():
                raise InputError(
                    f"the job {self.id} cannot be read, and may run on another machine: wait until "
                    f"its last sign of life is older than {LOST_SECONDS:.0f} s"
                )
            raise InputError(f"the job {self.id} is running: cancel it first")
        if isinstance(self._folder, JobFolder):
            with suppress(SerializationError):  # a damaged job is removed, too
                self._wait_for_copy(self._folder)
        self._folder.remove()

    def _wait_for_copy(self, folder: JobFolder) -> None:
        """Wait until the driver has completed the copy, if there is one: it reads the folder."""
        record = folder.submitted
        if record.copy is None or record.host != socket.gethostname():
            return
        deadline = time.monotonic() + _COPY_SECONDS
        while folder.is_locked():
            if time.monotonic() > deadline:
                raise ClusterError(
                    f"the job {self.id} is still being copied to "
                    f"{show(hide_password(record.copy))}: remove it later"
                )
            time.sleep(folder.look_seconds)

    def _check_exists(self) -> None:
        if not self._folder.exists:
            raise InputError(f"the job {self.id} was removed: there is no folder {self.folder}")


def _select_past(events: Sequence[Event]) -> list[Event]:
    """Return what to show of the past: notes, workers' lines, and the last epoch."""
    last = [one for one in events if isinstance(one, EpochEnded) and one.rank == 0][-1:]
    return [event for event in events if isinstance(event, Note | PrintedLine) or event in last]


def _call_patiently(seconds: float, deadline: float | None, call: Callable[[], Any]) -> Any:
    """Call again and again while a store fails, as long as its job cannot be lost."""
    end = min(time.monotonic() + LOST_SECONDS, deadline or math.inf)
    while True:
        try:
            return call()
        except ClusterError:
            if time.monotonic() > end:
                raise
            time.sleep(seconds)


def jobs(folder: PathOrUri | None = None) -> list[DetachedJob]:
    """Return all detached jobs of this user, oldest first.

    Parameters
    ----------
    folder
        Folder with the jobs, or URI with their copies. None (default): the environment variable
        ``TFDIST_JOBS``, or ``~/.local/state/tfdist/jobs``.

    Raises
    ------
    InputError
        The folder is neither a path nor a URI, or cannot be read.
    """
    return [DetachedJob(found) for found in list_jobs(find_store(folder))]


def attach_job(
    id: str, *, callbacks: Sequence[Observer] | None = None, folder: PathOrUri | None = None
) -> DetachedJob:
    """Return a detached job, submitted in any session, in Python or R.

    Parameters
    ----------
    id
        The job's ``id``, or enough of its end to be unique.
    callbacks
        `Observer` objects. While this session waits for the job, they see the epochs and steps that
        end from now on. Workers do not wait for them: training stops soon after one returns True.
    folder
        As in `jobs`.

    Raises
    ------
    InputError
        There is no such job, or a callback is not an `Observer`.
    """
    root = find_store(folder)
    observers, others = split_observers(callbacks)
    if others:
        raise InputError(
            "`callbacks` of a running job must be observers: Keras's own callbacks run on the "
            f"workers. Pass them to `{call_of('submit_training', ...)}`"
        )
    if not isinstance(id, str) or not id:
        raise InputError(f"`id` must be the id of a job, not {show(id)}")
    known = list_jobs(root)
    found = [one for one in known if one.id.endswith(id)]
    if len(found) != 1:
        newest = ", ".join(one.id for one in known[-5:]) or "none"
        reason = "several jobs end with" if found else "there is no job"
        raise InputError(f"{reason} {show(id)} in {root} (newest jobs: {newest})")
    return DetachedJob(found[0], observers)
