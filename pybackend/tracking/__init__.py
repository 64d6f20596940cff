"""Contents of the record of a training run, for any tracking system."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pybackend
from pybackend.core.api.observer import list_numbers
from pybackend.core.api.planning import describe_plan
from pybackend.core.api.prepared_training import PreparedTraining
from pybackend.core.api.train_result import TrainResult
from pybackend.core.data.files import write_whole
from pybackend.core.errors import ClusterError, InputError, TfdistError, WorkerFailedError
from pybackend.core.words import install, show, term
from pybackend.reporting.reports import report, write_report

# One chart per worker and value: more than these would hide all others.
_MOST_WORKERS = 64
_GIT_SECONDS = 5.0


def load_package(module: str, title: str) -> Any:
    """Import an optional package of this session; `InputError` if it is not installed."""
    check_package(module, title)
    return importlib.import_module(module)


def check_package(module: str, title: str) -> None:
    if find_spec(module) is None:
        raise InputError(f"{title} is not installed for {sys.executable}: {install(module)}")


def check_text(**values: Any) -> None:
    for name, value in values.items():
        if value is not None and (not isinstance(value, str) or not value):
            raise InputError(f"`{name}` must be text or {show(None)}, not {show(value)}")


def check_flags(**values: Any) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise InputError(f"`{name}` must be {show(True)} or {show(False)}, not {show(value)}")


def check_tags(tags: Any) -> dict[str, str]:
    if tags is None:
        return {}
    if not isinstance(tags, Mapping) or not all(isinstance(name, str) for name in tags):
        raise InputError(f"`tags` must be a {term('dict')} of text, not {show(tags)}")
    return {name: str(value) for name, value in tags.items()}


def explain_start(system: str, advice: str, error: Exception) -> ClusterError:
    """Return the error for a run that cannot be started, before any worker is."""
    return ClusterError(f"{system} cannot start a run: {type(error).__name__}: {error}. {advice}")


def describe_parameters(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return all settings that are set, nested ones with dots in their names."""
    found: dict[str, Any] = {}
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= describe_parameters(value, f"{prefix}{name}.")
        elif value is not None:
            plain = isinstance(value, (str, int, float))
            found[prefix + name] = value if plain else json.dumps(value, default=str)
    return found


def add_arguments(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Add the arguments of a trial; those whose name is taken start with ``model.``."""
    found = describe_parameters(arguments).items()
    own = {f"model.{name}" if name in parameters else name: value for name, value in found}
    return {**parameters, **own}


def describe_origin() -> dict[str, str]:
    """Return tags for the version of tfdist, and for the commit of the working directory if any."""
    found = {"tfdist.version": pybackend.__version__}
    try:
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, timeout=_GIT_SECONDS, text=True
        )
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
        values = {name: worker[name] for name in ("rows", "steps", "seconds", "waited")}
        values["rows_per_second"] = worker["rows_per_second"]
        times = worker["step_times"] or {}
        parts = ("data", "compute", "communication", "waiting")
        values |= {f"step_{part}": times[part] for part in parts if part in times}
        found |= {f"system/worker_{worker['rank']}/{name}": value for name, value in values.items()}
    return list_numbers({k: v for k, v in found.items() if isinstance(v, (int, float))})


def write_plan(prepared: PreparedTraining, folder: Path) -> None:
    """Write what the training run starts; nothing if the launcher cannot describe it now."""
    try:
        text = str(describe_plan(prepared))
    except TfdistError:
        return
    write_whole(str(folder / "plan.txt"), f"{text}\n".encode())


def write_result(result: TrainResult, folder: Path, *, reads_model: bool) -> None:
    """Write a result's report, and its record as JSON. ``reads_model``: the report shows the model,
    which imports TensorFlow in this process.
    """
    write_whole(str(folder / "result.json"), result.record.encode())
    if reads_model:
        report(result, folder / "report.html")
    else:
        write_report(json.loads(result.record), None, folder / "report.html")


def write_failure(error: BaseException, folder: Path) -> None:
    if isinstance(error, WorkerFailedError):
        report(error, folder / "report.html")


def write_model(result: TrainResult, folder: Path) -> Path:
    """Write the model in the format in which the workers returned it."""
    return result.save(folder / f"model.{result.model_format}")
