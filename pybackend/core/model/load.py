"""Load the model of a job in a worker, from the file or the function that the driver sent."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import keras

from pybackend.core.errors import InputError, SerializationError
from pybackend.core.job.job import EXTRAS, MODEL_DIGESTS, MODEL_FILE, MODEL_OBJECTS, ModelJob
from pybackend.core.model.compare import digest_start
from pybackend.core.model.compile_settings import compile_without_state
from pybackend.core.model.inputs import check_feature_names
from pybackend.core.model.serialization import read_own_model
from pybackend.core.model.transfer import read_objects, reseed
from pybackend.core.r.function import RFunction
from pybackend.core.words import either, kind_of, show


@dataclass(frozen=True)
class LoadedModel:
    """Model, and the driver's extras: ``callbacks`` and ``custom_objects``."""

    model: Any
    extras: dict[str, Any]
    is_from_r: bool
    """True if an R function built it: its parts may be R functions and classes, too."""
    is_by_value: bool = False
    make_copy: Callable[[], Any] | None = None
    """Creates the model from the driver once more, if the driver, too, can do so without a file."""
    stored: Path | None = None
    """A ``.keras`` file with state of the optimizer that the model does not have yet."""


def load_job_model(job: ModelJob, folder: Path, sent: dict[str, Any] | None = None) -> LoadedModel:
    """Load the model from a worker's folder.

    Parameters
    ----------
    sent
        Result of `unpickle_sent`, if something of it is in use already.

    Raises
    ------
    InputError
        The user's function returned something other than a model.
    SerializationError
        The file cannot be loaded.
    """
    extras = unpickle_sent(job, folder) if sent is None else sent
    # So a user's function builds the same weights on all ranks.
    keras.utils.set_random_seed(job.seed)
    _register(extras.get("custom_objects") or {})
    # A copy must share nothing with the callbacks, so it is unpickled again.
    if (folder / MODEL_OBJECTS).exists():
        model = extras["model"]
        reseed(model, job.seed)
        _check_start(folder, model)
        return LoadedModel(model, extras, False, True, lambda: unpickle_sent(job, folder)["model"])
    if job.model_source == "function":
        model = _build(extras["model"])
        check_feature_names(model, dict(job.feature_names))
        is_from_r = isinstance(extras["model"], RFunction)
        return LoadedModel(
            model, extras, is_from_r, False, lambda: _build(unpickle_sent(job, folder)["model"])
        )
    file = folder / MODEL_FILE
    is_sharded = job.shards_optimizer
    model = read_own_model(
        file.read_bytes(),
        custom_objects=extras.get("custom_objects"),
        safe_mode=job.safe_mode,
        compile=not is_sharded,
    )
    if is_sharded:  # Keras would create the optimizer's whole state
        compile_without_state(file, model, extras.get("custom_objects"), job.safe_mode)
    _check_start(folder, model)
    return LoadedModel(model, extras, False, stored=file if is_sharded else None)


def unpickle_sent(job: ModelJob, folder: Path) -> dict[str, Any]:
    """Configure Keras as on the driver; unpickle what the driver pickled in one file.

    These are ``callbacks``, ``custom_objects``, ``functions`` that return data, and the ``model``
    or the function that builds it, if it is not a Keras file.
    """
    configure_keras(job)
    # The launcher on this machine wrote the files from the driver's own objects.
    if (folder / MODEL_OBJECTS).exists():
        return read_objects((folder / MODEL_OBJECTS).read_bytes())
    extras = folder / EXTRAS
    found: dict[str, Any] = cloudpickle.loads(extras.read_bytes()) if extras.exists() else {}
    return found


def configure_keras(job: ModelJob) -> None:
    """Set Keras's global settings to the driver's."""
    keras.config.set_epsilon(job.epsilon)
    keras.config.set_floatx(job.floatx)
    keras.config.set_dtype_policy(job.dtype_policy)
    keras.config.set_image_data_format(job.image_data_format)


def _register(custom_objects: Mapping[str, Any]) -> None:
    """Register the driver's custom objects, so that the model's files use the same names."""
    for key, value in custom_objects.items():
        package, is_registered, name = key.partition(">")
        if is_registered:
            keras.saving.register_keras_serializable(package, name)(value)


def _check_start(folder: Path, model: Any) -> None:
    """Check that a model has the weights and the optimizer's state that the session sent.

    Raises
    ------
    SerializationError
        It has others: a class changes them when it is loaded, or another release of Keras does.
    """
    if (folder / MODEL_DIGESTS).exists():
        sent = json.loads((folder / MODEL_DIGESTS).read_text())
        found = digest_start(model)
        for name, digest in sent.items():
            if found.get(name) != digest:
                raise SerializationError(
                    f"the {name} of the model on this worker differ from those that the session "
                    f"sent. Keras here is {keras.__version__}: use the session's release, and "
                    "custom classes that do not change what was loaded"
                )


def _build(function: Any) -> Any:
    model = function()
    if not isinstance(model, keras.Model):
        note = ""
        if model is None:
            end = either("end it with `return model`", "its last line must be the model")
            compiling = either("model.compile()", "model$compile()")
            note = f": {end}, as `{compiling}` returns {show(None)}"
        raise InputError(f"the `model` function returned {kind_of(model)}, not a Keras model{note}")
    return model
