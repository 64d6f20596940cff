"""Save the trained model as a file that the driver can load."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import keras

from pybackend.core.data.files import check_writable, write_whole
from pybackend.core.engine.equal_state import find_trained
from pybackend.core.engine.step_changes import override
from pybackend.core.errors import InputError, SerializationError
from pybackend.core.job.job import TRAINED, WEIGHTS, TrainingJob
from pybackend.core.job.messages import Emit, Note
from pybackend.core.model.compare import compare_variables
from pybackend.core.model.file_checks import Format
from pybackend.core.model.serialization import model_to_bytes, read_own_model, sha256_of
from pybackend.core.model.transfer import LoadedModel, read_weights, write_weights
from pybackend.core.model.view import ModelView
from pybackend.core.words import call_of, setting, show

_NO_SETTINGS = (
    "the model will be written without its compile settings, which contain R functions: with a "
    "`uri` of `model_options` that ends in .weights.h5, the function that built it restores it "
    "completely"
)
_NO_FILE = (
    "this model cannot be written to a file, because its layers are R functions or classes: use a "
    "`uri` of `model_options` that ends in .weights.h5. "
)

_OTHERS_TRAINED = "a callback froze or unfroze layers: "
_NO_STATE = "the trained model has a new optimizer without state"
_SAME_LAYERS = "in the trained model, the same layers are frozen as before training"


@dataclass(frozen=True)
class SavingPlan:
    """File name extension of a model's file, and whether it includes compile settings.

    ``trained`` has the positions of the weights for which the optimizer has state.
    """

    format: Format | Literal["weights.h5"]
    compiled: bool
    trained: tuple[int, ...] = ()


def plan_saving(
    loaded: LoadedModel, view: ModelView, inputs: Any, job: TrainingJob, emit: Emit
) -> SavingPlan:
    """Find a way to write the model that can be read back: HDF5 if possible.

    Called before training, because an error after hours of training would come too late. ``inputs``
    is the result of `describe_inputs` for the rows. Raises `SerializationError` if the model cannot
    be written.
    """
    trained = find_trained(loaded.model)
    plans = [SavingPlan("h5", True, trained), SavingPlan("keras", True, trained)]
    if any(map(_has_learned_words, view.layers)):  # HDF5 files cannot store them
        plans = plans[1:]
    if loaded.is_from_r and _has_own_parts(loaded, view):
        plans = []  # Keras might use its own class of the same name
    if loaded.make_copy is not None:  # the driver can copy it, too, and only needs the weights
        plans.append(SavingPlan(WEIGHTS, True, trained))
    if loaded.is_from_r and job.model_uri is not None:
        plans.append(SavingPlan("h5", False, trained))
    if job.model_uri is not None:
        check_writable(job.model_uri, "model_options")
        kind = max((kind for kind in TRAINED if job.model_uri.endswith(f".{kind}")), key=len)
        plans = [plan for plan in plans if plan.format == kind]
        if not plans:
            raise InputError(
                "this model can only be written as HDF5: the `uri` must end in .h5, but is "
                f"{show(job.model_uri)}"
            )
    failure: SerializationError | None = None
    for plan in plans:
        try:
            data = encode_trained(loaded, plan)
            _check_can_be_read(loaded, view, data, plan, inputs, job.safe_mode)
        except SerializationError as error:
            # Weights come last, and are the least likely to fail.
            failure = error if plan.format == WEIGHTS else failure or error
            continue
        check_size(len(data), job)
        if not plan.compiled and loaded.is_from_r:
            emit(Note(_NO_SETTINGS))
        return plan
    assert failure is not None
    if loaded.is_from_r and job.model_uri is not None:
        raise SerializationError(f"{_NO_FILE}{failure}")
    raise failure


def _check_can_be_read(
    loaded: LoadedModel, view: ModelView, data: bytes, plan: SavingPlan, inputs: Any, safe: bool
) -> None:
    """Read a file as the driver will; raise `SerializationError` if that fails."""
    if plan.format != WEIGHTS:
        known = dict(loaded.extras.get("custom_objects") or {})
        if loaded.is_by_value:  # else the driver only knows the objects that it sent
            known = {**view.custom_objects, **known}
        # A pickled model may contain code, such as a Lambda layer's, which is the caller's own.
        safe_mode = safe and not loaded.is_by_value
        read_own_model(data, custom_objects=known, safe_mode=safe_mode)
    if loaded.is_by_value or plan.format == WEIGHTS:
        assert loaded.make_copy is not None
        copy = loaded.make_copy()
        if copy.built:
            for weight in copy.weights:  # so that a weight missing in the file differs
                if keras.backend.is_float_dtype(weight.dtype):
                    weight.assign(weight + 1)
        read_weights(copy, data, plan.format, inputs)
        if compare_variables("weights", loaded.model.weights, copy.weights):
            raise SerializationError("the file does not contain all of the weights")


def _has_learned_words(layer: Any) -> bool:
    """Return whether a layer has a vocabulary that its configuration does not contain."""
    return hasattr(layer, "get_vocabulary") and layer.get_config().get("vocabulary") is None


def check_size(size: int, job: TrainingJob) -> None:
    """Raise `InputError` if a trained model of this many bytes cannot be sent to the driver."""
    if job.model_uri is None and size > job.model_limit:
        raise InputError(
            f"the trained model takes {size / 1e6:,.0f} MB, but at most "
            f"{job.model_limit / 1e6:,.0f} MB can be sent to the driver: pass a path that "
            "all hosts share or a URI, e.g. "
            f"{setting(model_options=call_of('ModelOptions', uri='s3://bucket/model.h5'))}"
        )


def write_model(
    loaded: LoadedModel, plan: SavingPlan, folder: Path, uri: str | None, emit: Emit
) -> str:
    """Write ``trained.h5`` or ``trained.keras`` atomically, or to a URI; return its SHA-256."""
    data = encode_trained(loaded, plan)
    if plan.trained != find_trained(loaded.model):
        emit(Note(_OTHERS_TRAINED + (_SAME_LAYERS if plan.format == WEIGHTS else _NO_STATE)))
    write_whole(str(folder / f"trained.{plan.format}") if uri is None else uri, data)
    return sha256_of(data)


def _has_own_parts(loaded: LoadedModel, view: ModelView) -> bool:
    """Return whether a model has functions or classes that no argument on the driver names."""
    named = list((loaded.extras.get("custom_objects") or {}).values())
    parts = view.custom_parts
    has_unnamed = any(part not in named and type(part) not in named for part in parts)
    return has_unnamed or _has_functions(loaded.model)


def _has_functions(model: Any) -> bool:
    """Return whether a loss or a metric is a plain function."""

    def found(value: Any) -> bool:
        if isinstance(value, dict):
            return value.get("class_name") == "function" or any(map(found, value.values()))
        return isinstance(value, (list, tuple)) and any(map(found, value))

    return model.compiled and found(model.get_compile_config() or {})


def encode_trained(loaded: LoadedModel, plan: SavingPlan) -> bytes:
    """Return the model as a file in the plan's format, or raise `SerializationError`."""
    model = loaded.model
    if plan.format == WEIGHTS:
        return write_weights(model)
    if plan.compiled:
        has_state = plan.trained == find_trained(model)
        return model_to_bytes(model, format=plan.format, include_optimizer=has_state)
    with override(model, "compiled", False):
        return model_to_bytes(model, format=plan.format)
