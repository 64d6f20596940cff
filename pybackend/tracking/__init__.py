"""Contents of the record of a training run, for any tracking system."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar, cast

import pybackend
from pybackend.core.api.observer import Tracked, Tracker, list_numbers
from pybackend.core.api.planning import describe_plan
from pybackend.core.api.prepared_training import PreparedTraining
from pybackend.core.api.train_result import TrainResult
from pybackend.core.data.files import write_whole
from pybackend.core.errors import ClusterError, InputError, TfdistError, WorkerFailedError
from pybackend.core.job.arguments import check_flag
from pybackend.core.words import install, show
from pybackend.reporting.reports import report, write_report

# One chart per worker and value: more than these would hide all others.
_MOST_WORKERS = 64
_OF_WORKERS = ("rows", "steps", "seconds", "waited", "rows_per_second")
_OF_STEPS = ("data", "compute", "communication", "waiting")
_GIT_SECONDS = 5.0


@dataclass(frozen=True)
class RunTracker(Tracker):
    """Settings of any tracking system; ``arguments`` are those of a trial.

    A subclass has the name of the system, its package, advice for errors at the start, and the
    class of its runs.
    """

    run_name: str | None
    steps: bool
    log_model: bool
    arguments: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    package: ClassVar[str]
    advice: ClassVar[str]
    run: ClassVar[Any]

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if one.type == "bool":
                check_flag(one.name, value)
            is_text = isinstance(value, str) and value
            if one.type == "str | None" and value is not None and not is_text:
                raise InputError(f"`{one.name}` must be text or {show(None)}, not {show(value)}")
        if find_spec(self.package) is None:
            missing = f"{self.system} is not installed for {sys.executable}"
            raise InputError(f"{missing}: {install(self.package)}")

    def begin(self, prepared: PreparedTraining) -> Tracked:
        try:
            return cast("Tracked", self.run(importlib.import_module(self.package), self, prepared))
        except Exception as error:  # of its process, its stores and its servers
            raise ClusterError(
                f"{self.system} cannot start a run: {type(error).__name__}: {error}. {self.advice}"
            ) from error


class TrackedRun(Tracked):
    """Record of a training run: a subclass sends its contents to a tracking system."""

    def __init__(self, tracker: RunTracker) -> None:
        self._tracker = tracker

    def finish(self, result: TrainResult) -> None:
        try:
            self._add_result(result)
            with self._files("report") as folder:
                write_whole(str(folder / "result.json"), result.record.encode())
                if self._tracker.log_model:
                    report(result, folder / "report.html")
                else:  # without the model, whose description imports TensorFlow in this process
                    write_report(json.loads(result.record), None, folder / "report.html")
            if self._tracker.log_model and result.model_uri is None:
                self.add_model(result)
        finally:
            self._end(None)

    def fail(self, error: BaseException) -> None:
        try:
            self._add_error(f"{type(error).__name__}: {error}")
            with self._files("report") as folder:
                if isinstance(error, WorkerFailedError):
                    report(error, folder / "report.html")
        finally:
            self._end(error)

    @contextmanager
    def _files(self, kind: str) -> Iterator[Path]:
        """Yield a folder, whose files become artifacts; a plan or a failure may have none."""
        with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
            yield Path(folder)
            if os.listdir(folder):
                self._add_files(folder, kind)

    def _add_plan(self, prepared: PreparedTraining) -> None:
        """Add what the training run starts; nothing if the launcher cannot describe it now."""
        with self._files("plan") as folder, suppress(TfdistError):
            write_whole(str(folder / "plan.txt"), f"{describe_plan(prepared)}\n".encode())

    @abstractmethod
    def _add_result(self, result: TrainResult) -> None: ...

    @abstractmethod
    def _add_error(self, text: str) -> None: ...

    @abstractmethod
    def _add_files(self, folder: str, kind: str) -> None: ...

    def add_model(self, result: TrainResult) -> None:
        """Write the model in the format in which the workers returned it."""
        with self._files("model") as folder:
            result.save(folder / f"model.{result.model_format}")

    @abstractmethod
    def _end(self, error: BaseException | None) -> None:
        """End the run, unless it was active before; None: the training succeeded."""


def describe_parameters(prepared: PreparedTraining, tracker: RunTracker) -> dict[str, Any]:
    """Return the settings, and the arguments of a trial: ``model.<name>`` if a name is taken."""
    settings = _flatten(prepared.settings)
    arguments = _flatten(tracker.arguments).items()
    return settings | {f"model.{k}" if k in settings else k: value for k, value in arguments}


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return all settings that are set, nested ones with dots in their names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _flatten(value, f"{prefix}{name}.")
        elif value is not None:
            plain = isinstance(value, (str, int, float))
            found[prefix + name] = value if plain else json.dumps(value, default=str)
    return found


def describe_origin() -> dict[str, str]:
    """Return tags for the version of tfdist, and for the commit of the working directory if any."""
    found = {"tfdist.version": pybackend.__version__}
    try:
        command = ["git", "rev-parse", "HEAD"]
        git = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, text=True)
    except (OSError, subprocess.TimeoutExpired):
        return found
    return {**found, "tfdist.git_commit": git.stdout.strip()} if git.returncode == 0 else found


def describe_hosts(result: TrainResult) -> dict[str, str]:
    """Return tags for the hosts, and the URI of a model that was not sent here."""
    hosts = ",".join(dict.fromkeys(worker.host for worker in result.workers))
    found = {"tfdist.hosts": hosts, "tfdist.model_sha256": result.model_sha256}
    return {**found, "tfdist.model_uri": result.model_uri} if result.model_uri else found


def describe_result(result: TrainResult) -> dict[str, float]:
    """Return a result's numbers: of the call, of the audit, and of each worker."""
    record = json.loads(result.record)
    found = {
        **{f"test/{name.removeprefix('test_')}": value for name, value in result.metrics.items()},
        "system/seconds": result.seconds,
        **{f"system/{name}_seconds": value for name, value in result.parts.items()},
        "system/restarts": len(result.restarts),
        **{f"audit/{name}": value for name, value in (record["audit"] or {}).items()},
    }
    for worker in record["workers"][:_MOST_WORKERS]:
        times = worker["step_times"] or {}
        values = {name: worker[name] for name in _OF_WORKERS}
        values |= {f"step_{part}": times[part] for part in _OF_STEPS if part in times}
        found |= {f"system/worker_{worker['rank']}/{name}": value for name, value in values.items()}
    return list_numbers({k: v for k, v in found.items() if isinstance(v, (int, float))})
