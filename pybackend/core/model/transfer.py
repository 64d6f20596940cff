"""Send a model to the workers and back, without changing it.

The model is sent as Keras's own file. The driver first loads that file and compares the two models:
if anything is missing in the file, the model is pickled.
"""

from __future__ import annotations

import contextlib
import json
import random
import tempfile
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

import keras
import numpy as np

from pybackend.core.errors import ClusterError, InputError, SerializationError
from pybackend.core.job.job import MODEL_FILE, MODEL_OBJECTS, WEIGHTS
from pybackend.core.job.packages import TITLES, read_versions
from pybackend.core.job.pickling import Pickler, sending_code
from pybackend.core.model.by_value import (
    find_parts,
    pickle_objects,
    take_snapshot,
    unpickle_objects,
)
from pybackend.core.model.compare import Kind, find_differences, find_other_behavior, hash_weights
from pybackend.core.model.compile_settings import restore_optimizer_state
from pybackend.core.model.serialization import model_to_bytes, read_own_model, silence_keras
from pybackend.core.model.view import ModelView, build_model
from pybackend.core.words import show

# Keys that cannot be the name of an input.
_SHAPE, _TYPE = "/shape", "/type"
_WAYS_OUT = (
    "Pass a function that builds and compiles the model, or give the named classes a "
    "`get_config` that returns all arguments of their constructors"
)


def encode_objects(model: Any, others: Mapping[str, Any], rows: Any = None) -> dict[str, bytes]:
    """Pickle a model and what may hold parts of it, as a file for the workers.

    Parameters
    ----------
    others
        Callbacks, custom objects and functions, by name.
    rows
        Some rows of the training data, used to check a copy.

    Raises
    ------
    Exception
        Something in them cannot be pickled, or would be changed.
    """
    content = pickle_objects({**others, "model": model})
    # A view of its own: checks of a file may have called the model.
    if differences := _try_copy(ModelView(model), take_snapshot(model)(), "train", rows):
        raise InputError(f"pickling it loses {'; '.join(differences)}. {_WAYS_OUT}")
    return {MODEL_OBJECTS: json.dumps(read_versions()).encode() + b"\n" + content}


def holds_parts(callbacks: Sequence[Any], functions: Sequence[Any] = (), model: Any = None) -> bool:
    """Return whether layers, variables or models must be pickled with the model.

    Callbacks may hold these in attributes, or in objects that their functions refer to. In
    ``functions``, only parts of this model count.
    """
    own = {id(part) for part in find_parts(model)}
    # Models of an earlier training.
    models = {id(getattr(callback, "model", None)) for callback in callbacks}
    return _holds(callbacks, lambda part: True, models) or _holds(
        functions, lambda part: id(part) in own
    )


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
                raise LookupError
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
    kind: Kind,
    rows: Any = None,
) -> dict[str, bytes]:
    """Encode a model as Keras's own file, if that stores everything.

    Parameters
    ----------
    rows
        As in `encode_objects`.

    Raises
    ------
    InputError
        Names what the file does not store.
    SerializationError
        Keras cannot write the file, or cannot read it.
    """
    content = model_to_bytes(view.model, format="keras", include_optimizer=kind == "train")
    if kind == "predict" and not view.custom_parts:
        return {MODEL_FILE: content}  # Keras's own layers predict the same
    if names := view.equal_names:
        raise InputError(
            f"several classes or functions of this model are named {names[0]}, but Keras's file "
            f"format stores only one of them. {_WAYS_OUT}."
        )
    state = random.getstate()  # a copy is initialized at random first
    try:
        copy = read_own_model(content, custom_objects=custom_objects, safe_mode=safe_mode)
    finally:
        random.setstate(state)
    if differences := _try_copy(view, copy, kind, rows):
        raise InputError(
            "this model would not reach the workers unchanged: its Keras file "
            f"loses {'; '.join(differences)}. {_WAYS_OUT}."
        )
    return {MODEL_FILE: content}


def _try_copy(view: ModelView, copy: Any, kind: Kind, rows: Any) -> list[str]:
    found = find_differences(view, ModelView(copy), kind)
    return found if found or rows is None else find_other_behavior(view, copy, rows)


def read_objects(content: bytes) -> dict[str, Any]:
    """Decode, in a worker, the ``model`` and the others that `encode_objects` encoded.

    Raises
    ------
    ClusterError
        This Python has a different version of Keras or TensorFlow, whose objects differ.
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
    found: dict[str, Any] = unpickle_objects(pickled)
    return found


def reseed(model: Any, seed: int) -> None:
    """Seed random layers that have no explicit seed from the seed of the training run."""
    numbers = np.random.default_rng(seed)
    for layer in ModelView(model).layers:
        if getattr(layer, "seed", 0) is not None:
            continue
        for generator in vars(layer).values():
            if isinstance(generator, keras.random.SeedGenerator):
                fresh = keras.random.SeedGenerator(int(numbers.integers(2**31 - 1)))
                generator.state.assign(fresh.state)


def restore(model: Any, file: bytes, kind: str, inputs: Any, digest: str) -> Any:
    """Read the trained weights into a copy of the model that was sent to the workers.

    Parameters
    ----------
    kind
        File name extension: h5, keras, or weights.h5 if the file has only weights.
    inputs
        Result of `describe_inputs` for the training rows.
    digest
        Result of `hash_weights` for the trained model.

    Raises
    ------
    SerializationError
        The file does not hold the weights, or holds them in a different order.
    """
    read_weights(model, file, kind, inputs)
    if hash_weights(model) != digest:
        raise SerializationError(
            f"the weights of the trained model {show(model.name)} cannot be loaded into a copy of "
            "the model that was passed: a callback changed which of them are trainable, or a "
            "layer does not save all of its variables"
        )
    return model


def write_weights(model: Any) -> bytes:
    """Encode a model's weights and optimizer state, for models that Keras cannot write completely.

    Raises
    ------
    SerializationError
        Keras cannot write them.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder, silence_keras():
        path = Path(folder) / f"model.{WEIGHTS}"
        try:
            model.save_weights(path)
        except Exception as error:
            raise SerializationError(
                f"Keras cannot write the weights of {show(model.name)}: {error}"
            ) from error
        return path.read_bytes()


def read_weights(model: Any, file: bytes, kind: str, inputs: Any) -> None:
    """Load a model's weights and its optimizer's state from a file.

    Raises
    ------
    SerializationError
        They do not fit this model.
    """
    with tempfile.TemporaryDirectory(prefix="tfdist-") as folder, silence_keras():
        path = Path(folder) / f"model.{kind}"
        path.write_bytes(file)
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
