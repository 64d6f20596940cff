"""The trained model as a file that the driver will be able to load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pybackend.data.files import check_writable, write_whole
from pybackend.engine.overrides import override
from pybackend.errors import InputError, SerializationError
from pybackend.job.job import Job
from pybackend.job.messages import Emit, Note
from pybackend.model.file_checks import Format
from pybackend.model.load import LoadedModel
from pybackend.model.serialization import model_from_bytes, model_to_bytes, sha256_of

_NO_SETTINGS = (
    "the model will come back without its compile settings, which hold R functions: compile it "
    "again to evaluate it or to train it further"
)
_NO_LAYERS = (
    "the model cannot come back: layers that are R functions or classes exist on the workers "
    "only. Use layers of Keras; losses and metrics may be R functions. "
)


@dataclass(frozen=True)
class SavingPlan:
    """How to write a model: the format, and whether with its compile settings."""

    format: Format
    compiled: bool


def plan_saving(loaded: LoadedModel, job: Job, emit: Emit) -> SavingPlan:
    """Find a way to write the model that can be read back: HDF5 if possible.

    Done before training: to fail after hours of it would be too late.

    Raises
    ------
    SerializationError
        There is none.
    """
    plans = [SavingPlan("h5", True), SavingPlan("keras", True)]
    if loaded.is_from_r:  # no argument on the driver could name an R function
        plans.append(SavingPlan("h5", False))
        if _has_functions(loaded.model):  # Keras might take one for its own of the same name
            plans = [plan for plan in plans if not plan.compiled]
    if job.model_uri is not None:
        check_writable(job.model_uri)
        plans = [plan for plan in plans if job.model_uri.endswith(f".{plan.format}")]
        if not plans:
            raise InputError(
                f"this model can be written as HDF5 only: end {job.model_uri!r} in .h5"
            )
    failure: SerializationError | None = None
    for plan in plans:
        try:
            data = _encode(loaded.model, plan)
            model_from_bytes(
                data,
                custom_objects=loaded.extras.get("custom_objects"),
                safe_mode=job.safe_mode,
                sha256=sha256_of(data),
            )
        except SerializationError as error:
            failure = failure or error
            continue
        _check_size(len(data), job)
        if not plan.compiled:
            emit(Note(_NO_SETTINGS))
        return plan
    assert failure is not None
    raise SerializationError(f"{_NO_LAYERS}{failure}") if loaded.is_from_r else failure


def _check_size(size: int, job: Job) -> None:
    if job.model_uri is None and size > job.model_limit:
        raise InputError(
            f"the trained model will have {size / 1e6:,.0f} MB, and at most "
            f"{job.model_limit / 1e6:,.0f} MB come back through the driver: give `model_uri`, a "
            "path that all hosts share or a URI, e.g. model_uri='s3://bucket/model.h5'"
        )


def write_model(model: Any, plan: SavingPlan, folder: Path, uri: str | None) -> str:
    """Write ``trained.h5`` or ``trained.keras`` in one piece, or to a URI; returns its SHA-256."""
    data = _encode(model, plan)
    if uri is not None:
        write_whole(uri, data)
        return sha256_of(data)
    partial = folder / "trained.partial"
    partial.write_bytes(data)
    partial.replace(folder / f"trained.{plan.format}")
    return sha256_of(data)


def _has_functions(model: Any) -> bool:
    """Whether a loss or a metric is a plain function."""

    def found(value: Any) -> bool:
        if isinstance(value, dict):
            return value.get("class_name") == "function" or any(map(found, value.values()))
        return isinstance(value, (list, tuple)) and any(map(found, value))

    return model.compiled and found(model.get_compile_config() or {})


def _encode(model: Any, plan: SavingPlan) -> bytes:
    if plan.compiled:
        return model_to_bytes(model, format=plan.format)
    with override(model, "compiled", False):
        return model_to_bytes(model, format=plan.format)
