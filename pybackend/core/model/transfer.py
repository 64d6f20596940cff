"""Send a model to the workers and back, without changing it.

The model is sent as Keras's own file. The driver first loads that file and compares the two models:
if anything is missing in the file, the model is pickled. A worker loads what was sent, or calls the
function that builds the model. Trained weights, also those in a checkpoint, come back as a file.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import cloudpickle
import keras
import numpy as np

from pybackend.core.data.checkpoint_store import SavedCheckpoint
from pybackend.core.errors import ClusterError, InputError, SerializationError
from pybackend.core.job.job import (
    EXTRAS,
    MODEL_DIGESTS,
    MODEL_FILE,
    MODEL_OBJECTS,
    WEIGHTS,
    ModelJob,
)
from pybackend.core.job.pickling import Pickler, sending_code
from pybackend.core.job.value_codec import decode_state
from pybackend.core.machine.packages import TITLES, read_versions
from pybackend.core.model import by_value, compare, serialization
from pybackend.core.model.compile_settings import compile_without_state, restore_optimizer_state
from pybackend.core.model.inputs_outputs import check_feature_names
from pybackend.core.model.view import ModelView, build_model, list_other_variables
from pybackend.core.r.function import RFunction
from pybackend.core.words import call_of, either, kind_of, show

# Keys that cannot be the name of an input.
_SHAPE, _TYPE = "/shape", "/type"
_WAYS_OUT = (
    "Pass a function that builds and compiles the model, or give the named classes a "
    "`get_config` that returns all arguments of their constructors"
)


def encode_objects(model: Any, others: Mapping[str, Any], rows: Any = None) -> dict[str, bytes]:
    """Pickle a model and what may hold parts of it, as a file for the workers.

    ``others`` are callbacks, custom objects and functions, by name. A copy is checked with some
    rows of the training data. Something that cannot be pickled may raise any error.
    """
    content = by_value.pickle_objects({**others, "model": model})
    # A view of its own: checks of a file may have called the model.
    if differences := _try_copy(ModelView(model), by_value.take_snapshot(model)(), "train", rows):
        raise InputError(f"pickling it loses {'; '.join(differences)}. {_WAYS_OUT}")
    return {MODEL_OBJECTS: json.dumps(read_versions()).encode() + b"\n" + content}


def holds_parts(callbacks: Sequence[Any], functions: Sequence[Any] = (), model: Any = None) -> bool:
    """Return whether layers, variables or models must be pickled with the model.

    Callbacks may hold these in attributes, or in objects that their functions refer to. In
    ``functions``, only parts of this model count.
    """
    own = {id(part) for part in by_value.find_parts(model)}
    # Models of an earlier training.
    models = {id(getattr(callback, "model", None)) for callback in callbacks}
    of_callbacks = _holds(callbacks, lambda part: True, models)
    return of_callbacks or _holds(functions, lambda part: id(part) in own)


def _holds(
    values: Sequence[Any], is_part: Callable[[Any], bool], models: Collection[int] = ()
) -> bool:
    """Return whether pickling values reaches a part of a model; ``models``: ids of others."""
    found: list[Any] = []

    def look(value: Any) -> Any:
        if isinstance(value, (keras.Variable, keras.layers.Layer)):
            if id(value) in models:
                return str, ()
            if is_part(value):
                found.append(value)
                raise LookupError  # ends the search
        return None

    file = cast("IO[bytes]", SimpleNamespace(write=len))  # rows may be large
    with sending_code() as send_code:
        for value in values:
            send_code(value)
        with contextlib.suppress(Exception):  # reported later, if it cannot be pickled
            Pickler(file, look=look).dump(list(values))
    return bool(found)


def encode_file(
    view: ModelView,
    custom_objects: Mapping[str, Any],
    safe_mode: bool,
    kind: compare.Kind,
    rows: Any = None,
) -> dict[str, bytes]:
    """Encode a model as Keras's own file, if that stores everything.

    A copy is checked with some rows. Raises `InputError`, which names what the file does not store,
    and `SerializationError` if Keras cannot write the file, or cannot read it.
    """
    trains = kind == "train"
    content = serialization.model_to_bytes(view.model, format="keras", include_optimizer=trains)
    if kind == "predict" and not view.custom_parts:
        return {MODEL_FILE: content}  # Keras's own layers predict the same
    if names := view.equal_names:
        raise InputError(
            f"several classes or functions of this model are named {names[0]}, but Keras's file "
            f"format stores only one of them. {_WAYS_OUT}."
        )
    state = random.getstate()  # a copy is initialized at random first
    try:
        copy = serialization.read_own_model(
            content, custom_objects=custom_objects, safe_mode=safe_mode
        )
    finally:
        random.setstate(state)
    if differences := _try_copy(view, copy, kind, rows):
        raise InputError(
            "this model would not reach the workers unchanged: its Keras file "
            f"loses {'; '.join(differences)}. {_WAYS_OUT}."
        )
    return {MODEL_FILE: content}


def _try_copy(view: ModelView, copy: Any, kind: compare.Kind, rows: Any) -> list[str]:
    found = compare.find_differences(view, ModelView(copy), kind)
    return found if found or rows is None else compare.find_other_behavior(view, copy, rows)


def read_objects(content: bytes) -> dict[str, Any]:
    """Decode, in a worker, the ``model`` and the others that `encode_objects` encoded.

    Raises `ClusterError` if this Python has another version of Keras or TensorFlow, whose objects
    differ.
    """
    versions, _, pickled = content.partition(b"\n")
    theirs, own = json.loads(versions), read_versions()
    for package, title in TITLES.items():
        if theirs[package] != own[package]:
            raise ClusterError(
                f"the driver has {title} {theirs[package]}, but {own['python']} "
                f"has {own[package]}: models can only be sent between identical versions. Install "
                "the same version, or pass a function that builds the model"
            )
    found: dict[str, Any] = by_value.unpickle_objects(pickled)
    return found


def reseed(model: Any, seed: int) -> None:
    """Seed random layers that have no explicit seed from the seed of the training run."""
    numbers = np.random.default_rng(seed)
    for layer in ModelView(model).layers:
        if getattr(layer, "seed", 0) is not None:  # it has a seed of its own, or is not random
            continue
        for generator in vars(layer).values():
            if isinstance(generator, keras.random.SeedGenerator):
                fresh = keras.random.SeedGenerator(int(numbers.integers(2**31 - 1)))
                generator.state.assign(fresh.state)


def restore(model: Any, file: bytes, kind: str, inputs: Any, digest: str) -> Any:
    """Read the trained weights into a copy of the model that was sent to the workers.

    ``kind`` is an extension: h5, keras, or weights.h5 if the file has only weights. ``inputs`` is
    the result of `describe_inputs` for the training rows, and ``digest`` that of `hash_weights` for
    the trained model.
    """
    read_weights(model, file, kind, inputs)
    if compare.hash_weights(model) != digest:
        raise SerializationError(
            f"the weights of the trained model {show(model.name)} cannot be loaded into a copy of "
            "the model that was passed: a callback changed which of them are trainable, or a "
            "layer does not save all of its variables"
        )
    return model


def write_weights(model: Any) -> bytes:
    """Encode the weights and optimizer state of a model that Keras cannot write completely."""
    with serialization.model_file(WEIGHTS) as path:
        try:
            model.save_weights(path)
        except Exception as error:
            raise SerializationError(
                f"Keras cannot write the weights of {show(model.name)}: {error}"
            ) from error
        return path.read_bytes()


def read_weights(model: Any, file: bytes, kind: str, inputs: Any) -> None:
    """Load a model's weights and its optimizer's state from a file; arguments as in `restore`."""
    with serialization.model_file(kind, file) as path:
        try:
            build_model(model, _make_zeros(inputs))
            if model.compiled and model.optimizer is not None and not model.optimizer.built:
                model.optimizer.build(model.trainable_variables)
            model.load_weights(path)
            if kind == "h5" and model.compiled:
                restore_optimizer_state(path, model)
        except SerializationError:
            raise
        except Exception as error:
            raise SerializationError(
                f"the weights of the trained model do not fit {show(model.name)}: {error}"
            ) from error


def describe_inputs(inputs: Any) -> Any:
    """Return the shape and type of each array in nested inputs, as data for JSON."""
    if isinstance(inputs, Mapping):
        return {name: describe_inputs(item) for name, item in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return [describe_inputs(item) for item in inputs]
    return {_SHAPE: list(inputs.shape), _TYPE: inputs.dtype.str}


def _make_zeros(inputs: Any) -> Any:
    """Return zeros with the described shapes and types; text is empty."""
    if isinstance(inputs, list):
        return [_make_zeros(item) for item in inputs]
    if _SHAPE not in inputs:
        return {name: _make_zeros(item) for name, item in inputs.items()}
    dtype = np.dtype(inputs[_TYPE])
    return np.full(inputs[_SHAPE], b"" if dtype.kind == "O" else 0, dtype)


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

    ``sent`` is the result of `unpickle_sent`, if something of it is in use already. Raises
    `InputError` if the function returned something other than a model, and `SerializationError` if
    the file cannot be loaded.
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
    file, custom_objects = folder / MODEL_FILE, extras.get("custom_objects")
    is_sharded, is_safe = job.shards_optimizer, job.safe_mode
    model = serialization.read_own_model(
        file.read_bytes(), custom_objects=custom_objects, safe_mode=is_safe, compile=not is_sharded
    )
    if is_sharded:  # Keras would create the optimizer's whole state
        compile_without_state(file, model, custom_objects, is_safe)
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
    """Check that a model has the weights and the optimizer's state that the session sent."""
    # A class may change them when it is loaded, and so may another release of Keras.
    if (folder / MODEL_DIGESTS).exists():
        sent = json.loads((folder / MODEL_DIGESTS).read_text())
        found = compare.digest_start(model)
        for name in sent:
            if found.get(name) != sent[name]:
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


def restore_saved(
    saved: SavedCheckpoint, model: Any, custom_objects: Mapping[str, Any] | None, safe_mode: bool
) -> Any:
    """Return the model of a checkpoint; parameters and errors as in `load_checkpoint`."""
    manifest = saved.manifest
    if saved.model is None:
        raise SerializationError(
            f"the model file {manifest.model.name}, which all checkpoints there share, is missing "
            "or damaged. Training can resume without it: repeat the original call with "
            f"{call_of('Recovery', ..., resume=True)}, which writes it again"
        )
    if model is not None:
        model = model() if callable(model) and not hasattr(model, "weights") else model
        read_weights(model, saved.model, manifest.model_format, manifest.inputs)
    elif manifest.model_format == WEIGHTS:
        raise InputError(
            "Keras cannot write a complete file of this model: pass `model`, a function that "
            "builds it"
        )
    else:
        model = serialization.model_from_bytes(
            saved.model, custom_objects=custom_objects, safe_mode=safe_mode
        )
    # If the initial weights are equal, their order is the same.
    if compare.hash_weights(model) != manifest.model_weights:
        raise SerializationError(
            "this is not the model that was trained: its weights differ, or are in a different "
            "order"
        )
    state = decode_state(saved.state)
    _assign(model.weights, state.get("final") or state["variables"])
    if model.compiled and model.optimizer is not None:
        model.optimizer.build(model.trainable_variables)
        # Weights come first, then the generators; the optimizer's follow.
        first = len(model.weights) + len(list_other_variables(model))
        _assign(model.optimizer.variables, state["variables"][first:])
    return model


def _assign(variables: Any, values: Any) -> None:
    for variable, value in zip(variables, values, strict=False):
        if tuple(variable.shape) != value.shape:
            raise SerializationError(
                f"the checkpoint has an array of shape {show(value.shape)} for {variable.path}, "
                f"which has {show(tuple(variable.shape))}"
            )
        variable.assign(value)
