"""How a model gets to the workers, and back: what trains is what was passed.

It travels as Keras's own file. The driver loads that before it is sent, and compares: if something
would be forgotten, the model travels by value.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np

from pybackend.errors import ClusterError, InputError, SerializationError
from pybackend.job.job import MODEL_FILE, MODEL_OBJECTS, WEIGHTS
from pybackend.job.packages import TITLES, read_versions
from pybackend.job.pickling import Pickler
from pybackend.model.behavior import find_other_behavior
from pybackend.model.by_value import pickle_objects, take_snapshot, unpickle_objects
from pybackend.model.compare import Kind, find_differences, hash_weights
from pybackend.model.layers import (
    build_model,
    find_custom_parts,
    find_equal_names,
    find_layers,
)
from pybackend.model.optimizer_state import restore_optimizer_state
from pybackend.model.serialization import model_to_bytes, read_own_model, silence_keras

# Keys that no input of a model has as a name.
_SHAPE, _TYPE = "/shape", "/type"
_WAYS_OUT = (
    "Pass a function that builds and compiles the model, or give the classes that it names a "
    "`get_config` with all that they were made with"
)


def encode_objects(
    model: Any,
    callbacks: Sequence[Any],
    custom_objects: Mapping[str, Any],
    rows: Any = None,
) -> dict[str, bytes]:
    """A model and the callbacks that may hold parts of it, by value, as a file for the workers.

    Parameters
    ----------
    rows
        Some rows to train on, by which a copy is tried.

    Raises
    ------
    Exception
        Something in them cannot be pickled, or would arrive as something else.
    """
    content = pickle_objects((model, list(callbacks), dict(custom_objects)))
    if differences := _try_copy(model, take_snapshot(model)(), "train", rows):
        raise InputError(f"pickling it forgets {'; '.join(differences)}. {_WAYS_OUT}")
    return {MODEL_OBJECTS: json.dumps(read_versions()).encode() + b"\n" + content}


def holds_parts(callbacks: Sequence[Any]) -> bool:
    """Whether callbacks hold layers, variables or models, which are to be those that train.

    Be it in attributes, or in what their functions refer to.
    """
    finder = _PartFinder(callbacks)
    with contextlib.suppress(Exception):  # what cannot be pickled is named by what comes next
        finder.dump(list(callbacks))
    return finder.found


class _PartFinder(Pickler):
    """Pickles, and stops at the first part of a model."""

    def __init__(self, callbacks: Sequence[Any]) -> None:
        super().__init__(io.BytesIO())
        self.found = False
        # Of an earlier training.
        self._models = {id(getattr(callback, "model", None)) for callback in callbacks}

    def reducer_override(self, value: Any) -> Any:
        """As cloudpickle; raises `LookupError` at a part of a model."""
        if isinstance(value, (keras.Variable, keras.layers.Layer)):
            if id(value) in self._models:
                return str, ()
            self.found = True
            raise LookupError
        return super().reducer_override(value)


def encode_file(
    model: Any,
    custom_objects: Mapping[str, Any],
    safe_mode: bool,
    kind: Kind,
    rows: Any = None,
) -> dict[str, bytes]:
    """A model as Keras's own file, if that has all of it.

    Parameters
    ----------
    rows
        As in `encode_objects`.

    Raises
    ------
    InputError
        Names what the file would forget.
    SerializationError
        Keras cannot write the file, or cannot read it.
    """
    content = model_to_bytes(model, format="keras", include_optimizer=kind == "train")
    if kind == "predict" and not find_custom_parts(model):
        return {MODEL_FILE: content}  # Keras's own layers predict the same
    if names := find_equal_names(model):
        raise InputError(
            f"several classes or functions of this model are named {names[0]}, of which Keras's "
            f"file of it knows one. {_WAYS_OUT}."
        )
    state = random.getstate()  # a copy is initialized at random first
    try:
        copy = read_own_model(content, custom_objects=custom_objects, safe_mode=safe_mode)
    finally:
        random.setstate(state)
    if differences := _try_copy(model, copy, kind, rows):
        raise InputError(
            "this model would not arrive at the workers as it is: Keras's file of it "
            f"forgets {'; '.join(differences)}. {_WAYS_OUT}."
        )
    return {MODEL_FILE: content}


def _try_copy(model: Any, copy: Any, kind: Kind, rows: Any) -> list[str]:
    found = find_differences(model, copy, kind)
    return found if found or rows is None else find_other_behavior(model, copy, rows)


def read_objects(content: bytes) -> tuple[Any, list[Any], dict[str, Any]]:
    """The model, callbacks and custom objects of `encode_objects`, in a worker.

    Raises
    ------
    ClusterError
        This Python has another version of Keras or TensorFlow, whose objects are others.
    """
    versions, _, pickled = content.partition(b"\n")
    theirs, own = json.loads(versions), read_versions()
    for package, title in TITLES.items():
        if theirs[package] != own[package]:
            raise ClusterError(
                f"the driver has {title} {theirs[package]}, and {own['python']} has "
                f"{own[package]}: models travel between equal versions only. Install the same one, "
                "or pass a function that builds the model"
            )
    model, callbacks, custom_objects = unpickle_objects(pickled)
    return model, callbacks, custom_objects


def reseed(model: Any, seed: int) -> None:
    """Have random layers whose seed nobody has chosen draw from the seed of the training."""
    numbers = np.random.default_rng(seed)
    for layer in find_layers(model):
        if getattr(layer, "seed", 0) is not None:
            continue
        for generator in vars(layer).values():
            if isinstance(generator, keras.random.SeedGenerator):
                fresh = keras.random.SeedGenerator(int(numbers.integers(2**31 - 1)))
                generator.state.assign(fresh.state)


def restore(model: Any, file: bytes, kind: str, inputs: Any, digest: str) -> Any:
    """A copy of the model that was sent to the workers, given what came back.

    Parameters
    ----------
    kind
        What the file's name ends in: h5, keras, or weights.h5 if it has weights alone.
    inputs
        `describe_inputs` of the rows that it was trained on.
    digest
        `hash_weights` of the trained model.

    Raises
    ------
    SerializationError
        The file does not hold the weights, or not in the order of this model's.
    """
    read_weights(model, file, kind, inputs)
    if hash_weights(model) != digest:
        raise SerializationError(
            f"the weights of the trained model {model.name!r} cannot be put into a copy of the one "
            "that was passed: a callback has changed which of them are trained, or a layer does "
            "not save all of its variables"
        )
    return model


def write_weights(model: Any) -> bytes:
    """A model's weights and its optimizer's state, for models that Keras cannot write as a whole.

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
                f"Keras cannot write the weights of {model.name!r}: {error}"
            ) from error
        return path.read_bytes()


def read_weights(model: Any, file: bytes, kind: str, inputs: Any) -> None:
    """Give a model the weights of its file, and its optimizer the state.

    Raises
    ------
    SerializationError
        They are not those of this model.
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
                f"the weights of the trained model do not fit {model.name!r}: {error}"
            ) from error


def describe_inputs(inputs: Any) -> Any:
    """Shape and type of each array of nested inputs, as JSON can hold them."""
    if isinstance(inputs, Mapping):
        return {name: describe_inputs(item) for name, item in inputs.items()}
    if isinstance(inputs, (list, tuple)):
        return [describe_inputs(item) for item in inputs]
    return {_SHAPE: list(inputs.shape), _TYPE: inputs.dtype.str}


def _make_zeros(inputs: Any) -> Any:
    """Inputs of a description; text is empty."""
    if isinstance(inputs, list):
        return [_make_zeros(item) for item in inputs]
    if _SHAPE not in inputs:
        return {name: _make_zeros(item) for name, item in inputs.items()}
    dtype = np.dtype(inputs[_TYPE])
    return np.full(inputs[_SHAPE], b"" if dtype.kind == "O" else 0, dtype)
