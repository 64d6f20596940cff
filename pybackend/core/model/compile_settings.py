"""Compile settings and optimizer state in model files, and as text by which models are compared.

When Keras 3 restores an optimizer from its own group in an HDF5 file, it has no variables to
update, and the next `fit` fails with "Unknown variable". So the state is stored in a separate
group, and Keras's group is removed before Keras reads it (a loaded model then starts with a fresh
optimizer).

From HDF5, Keras reads neither short names of losses or metrics ("mae" would be called
"mean_absolute_error"), nor `jit_compile` and similar settings. When it writes HDF5, it removes the
optimizer from the model's own settings. Neither format has `auto_scale_loss`.
"""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pybackend.core.errors import SerializationError
from pybackend.core.words import either, setting, show

_GROUP = "tfdist_optimizer_state"
_KERAS_GROUP = "optimizer_weights"
_ATTRIBUTE = "tfdist_compile_config"
_CONFIG = "config.json"
_WEIGHTS = "model.weights.h5"
_SHARED = "shared_object_id"


def _open(file: Any, mode: str = "r") -> Any:
    import h5py

    return h5py.File(file, mode)


def write_optimizer_state(path: Path, optimizer: Any) -> None:
    with _open(path, "r+") as file:
        group = file.create_group(_GROUP)
        for index, variable in enumerate(optimizer.variables):
            group.create_dataset(str(index), data=variable.numpy().astype(_stored_type(variable)))


def remove_keras_optimizer_state(path: Path) -> None:
    with _open(path, "r+") as file:
        if _KERAS_GROUP in file:
            del file[_KERAS_GROUP]


def restore_optimizer_state(path: Path, model: Any) -> None:
    """Restore the optimizer's state of a loaded model from its HDF5 file, if there is one.

    Raises `SerializationError` if it does not belong to this optimizer; the model is unchanged.
    """
    with _open(path) as file:
        group = file.get(_GROUP)
        if group is None:
            return
        model.optimizer.build(model.trainable_variables)
        variables = model.optimizer.variables
        datasets = _find_datasets(group, len(variables), model)
        for variable, dataset in zip(variables, datasets, strict=True):
            _check_dataset(dataset, variable)
        # Only now, so that an error leaves the model unchanged.
        for variable, dataset in zip(variables, datasets, strict=True):
            variable.assign(dataset[()].astype(variable.dtype))


def _find_datasets(group: Any, count: int, model: Any) -> list[Any]:
    import h5py

    names = [str(index) for index in range(count)]
    is_ours = isinstance(group, h5py.Group) and sorted(group) == sorted(names)
    if not is_ours or not all(isinstance(group[name], h5py.Dataset) for name in names):
        raise SerializationError(
            "the optimizer's state in the model file does not belong to its optimizer, "
            f"{type(model.optimizer).__name__} with {count} variables: it was altered. Save the "
            "model again"
        )
    return [group[name] for name in names]


def _check_dataset(dataset: Any, variable: Any) -> None:
    expected = tuple(variable.shape), _stored_type(variable)
    received = dataset.shape, dataset.dtype.newbyteorder("=")
    if received != expected:
        raise SerializationError(
            f"the optimizer's state in the model file has {received[1]} values of shape "
            f"{show(received[0])} for {show(variable.path)}, expected {expected[1]} of shape "
            f"{show(expected[0])}: the file was altered. Save the model again"
        )


def _stored_type(variable: Any) -> np.dtype[Any]:
    """Return the type in which a variable is stored: HDF5 has no bfloat16."""
    return np.dtype("float32" if variable.dtype == "bfloat16" else variable.dtype)


def drop_optimizer_state(path: Path) -> None:
    """Remove the optimizer's state from the weights inside a ``.keras`` file."""
    members = _read_members(path)
    weights = io.BytesIO(members[_WEIGHTS])
    with _open(weights, "r+") as file:
        if "optimizer" not in file:
            return
        # A loss-scaling optimizer has another one inside.
        stored: list[str] = []
        file["optimizer"].visit(stored.append)
        for name in stored:
            if name.rpartition("/")[0].endswith("vars"):
                del file["optimizer"][name]
    _write_members(path, {**members, _WEIGHTS: weights.getvalue()})


@contextmanager
def open_optimizer_state(path: Path) -> Iterator[Sequence[Any]]:
    """Open the optimizer's variables in a ``.keras`` file as HDF5 datasets, in Keras's order."""
    with zipfile.ZipFile(path) as archive, archive.open(_WEIGHTS) as member, _open(member) as file:
        # By number: as texts, "10" comes before "2".
        stored = file.get("optimizer/vars") or {}
        yield [stored[str(number)] for number in range(len(stored))]


def compile_without_state(
    path: Path, model: Any, custom_objects: Mapping[str, Any] | None, safe_mode: bool
) -> None:
    """Compile a model as in its ``.keras`` file, without the optimizer's state for its weights."""
    config = json.loads(_read_members(path)[_CONFIG])
    if config.get("compile_config"):
        compile_as_written(model, config["compile_config"], custom_objects, safe_mode)


def _read_members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _write_members(path: Path, members: Mapping[str, bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)


def write_compile_settings(path: Path, model: Any) -> None:
    """Add all settings of a compiled model to its HDF5 file, in Keras's format."""
    settings = _describe(model)
    if not settings:
        return
    keras_settings = dict(settings)
    keras_settings["optimizer_config"] = keras_settings.pop("optimizer")
    keras_settings["loss"] = _expand_names(settings.get("loss"))
    with _open(path, "r+") as file:
        file.attrs["training_config"] = json.dumps(keras_settings).encode()
        file.attrs[_ATTRIBUTE] = json.dumps(settings).encode()


def read_compile_settings(path: Path) -> dict[str, Any] | None:
    """Read what `write_compile_settings` wrote to an HDF5 file; None if there is nothing."""
    with _open(path) as file:
        written = file.attrs.get(_ATTRIBUTE)
    return None if written is None else dict(json.loads(written))


def compile_as_written(
    model: Any,
    written: Mapping[str, Any],
    custom_objects: Mapping[str, Any] | None,
    safe_mode: bool,
) -> None:
    """Compile a model with the result of `read_compile_settings`."""
    import keras

    settings = keras.saving.deserialize_keras_object(
        dict(written), custom_objects=dict(custom_objects or {}), safe_mode=safe_mode
    )
    model.compile(**settings)


def complete_archive(path: Path, model: Any) -> None:
    """Add the settings that Keras leaves out to a ``.keras`` file."""
    import keras

    if type(model).compile is not keras.Model.compile and not _is_left_unscaled(model):
        return
    known = model.get_compile_config() or {}
    settings = _describe(model)  # with the optimizer, which Keras forgets when it writes HDF5
    missing = {k: v for k, v in settings.items() if v is not None and known.get(k) is None}
    if missing:
        members = _read_members(path)
        config = json.loads(members[_CONFIG])
        config["compile_config"] |= missing
        _write_members(path, {**members, _CONFIG: json.dumps(config).encode()})


def _describe(model: Any) -> dict[str, Any]:
    import keras

    settings = dict(model.get_compile_config() or {})
    if not settings or model.optimizer is None:
        return {}
    if settings.get("optimizer") is None:
        settings["optimizer"] = keras.saving.serialize_keras_object(model.optimizer)
    return settings | ({"auto_scale_loss": False} if _is_left_unscaled(model) else {})


def _is_left_unscaled(model: Any) -> bool:
    """Return whether a half-precision model was compiled with `auto_scale_loss=False`."""
    import keras

    if not model.compiled or model.optimizer is None or model.compute_dtype != "float16":
        return False
    return not isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)


def _expand_names(loss: Any) -> Any:
    """Return losses without short names: Keras cannot read "mse" from HDF5."""
    import keras

    if isinstance(loss, str):
        try:
            return keras.losses.serialize(keras.losses.get(loss))
        except ValueError as error:
            raise SerializationError(
                f"Keras cannot read the loss {show(loss)} back from HDF5: use "
                f"{setting(format='keras')}, or compile the model with a loss object, e.g. "
                f"{either('keras.losses.MeanSquaredError', 'keras3::loss_mean_squared_error')}()"
            ) from error
    if isinstance(loss, dict) and "class_name" not in loss:
        return {name: _expand_names(item) for name, item in loss.items()}
    if isinstance(loss, (list, tuple)):
        return [_expand_names(item) for item in loss]
    return loss


def describe_structure(model: Any) -> str:
    """Return a model's layers and compile settings as JSON, but not its weights.

    Empty for a model that cannot be described, e.g. of a class without ``get_config``. The learning
    rate of its optimizer is left out; see `describe_rate`.
    """
    import keras

    try:
        described = dict(keras.saving.serialize_keras_object(model))
        described.pop("compile_config", None)  # the same settings
        settings = model.get_compile_config() if model.compiled else None
        optimizer = _find_optimizer(settings)
        if optimizer is not None:  # compared separately: `describe_rate`
            del optimizer["learning_rate"]
        return describe_config([described, settings])
    except Exception:  # a custom class may raise any error
        return ""


def describe_rate(model: Any) -> Any:
    """Return the learning rate of a compiled model's optimizer: a number, or a schedule as JSON.

    None if there is none, or if the model cannot be described.
    """
    try:
        optimizer = _find_optimizer(model.get_compile_config())
    except Exception:  # a custom class may raise any error
        return None
    rate = None if optimizer is None else optimizer["learning_rate"]
    return rate if isinstance(rate, float) else json.loads(describe_config(rate))


def _find_optimizer(settings: Any) -> dict[str, Any] | None:
    """Return the arguments of the optimizer that has the learning rate, perhaps a wrapped one."""
    part = settings.get("optimizer") if isinstance(settings, dict) else None
    while isinstance(part, dict):
        config = part.get("config")
        if not isinstance(config, dict):
            return None
        if "learning_rate" in config:
            return config
        part = config.get("inner_optimizer")
    return None


def describe_config(config: Any) -> str:
    """Return Keras's configuration of a model as JSON that is the same for equal models.

    It ignores differences that occur between equal models: numbers in names, which Keras increments
    in every process; memory addresses; seeds that layers have drawn; and the code of lambdas, which
    contains the name of its file.
    """
    marks = {}
    for number, mark in enumerate(dict.fromkeys(_find_marks(config))):
        name = re.sub(r"_\d+$", "", mark) if isinstance(mark, str) else "object"
        marks[mark] = f"{name}#{number}"
    return json.dumps(_renumber(config, marks))


def _find_marks(value: Any) -> Iterator[str | int]:
    """Yield the names of layers, in order, and the numbers of shared objects."""
    if isinstance(value, list | tuple):
        for item in value:
            yield from _find_marks(item)
    elif isinstance(value, dict):
        own = [value.get("name"), value.get(_SHARED)]
        yield from (mark for mark in own if isinstance(mark, str | int))
        for item in value.values():
            yield from _find_marks(item)


def _renumber(value: Any, marks: Mapping[str | int, str]) -> Any:
    if isinstance(value, dict):
        if value.get("class_name") == "__lambda__":
            return "a lambda"
        items = {key: item for key, item in value.items() if key not in ("seed", "seed_generator")}
        return {
            marks.get(key, key): marks[item] if key == _SHARED else _renumber(item, marks)
            for key, item in items.items()
        }
    if isinstance(value, list | tuple):
        return [_renumber(item, marks) for item in value]
    return marks.get(value, value) if isinstance(value, str) else value
