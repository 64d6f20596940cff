"""Complete compile settings of a model, stored in its file.

From HDF5, Keras reads neither short names of losses nor those of metrics ("mae" would be called
"mean_absolute_error"), nor `jit_compile` and similar settings. When it writes HDF5, it removes the
optimizer from the model's own settings. Neither format has `auto_scale_loss`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pybackend.errors import SerializationError
from pybackend.model.optimizer_state import read_members, write_members

_ATTRIBUTE = "tfdist_compile_config"
_CONFIG = "config.json"


def write_compile_settings(path: Path, model: Any) -> None:
    """Add the settings of a compiled model to its HDF5 file, in Keras's form and completely."""
    import h5py

    settings = _describe(model)
    if not settings:
        return
    keras_settings = dict(settings)
    keras_settings["optimizer_config"] = keras_settings.pop("optimizer")
    keras_settings["loss"] = _expand_names(settings.get("loss"))
    with h5py.File(path, "r+") as file:
        file.attrs["training_config"] = json.dumps(keras_settings).encode()
        file.attrs[_ATTRIBUTE] = json.dumps(settings).encode()


def read_compile_settings(path: Path) -> dict[str, Any] | None:
    """Read what `write_compile_settings` wrote to an HDF5 file; None if there is nothing."""
    import h5py

    with h5py.File(path, "r") as file:
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
    if not _is_left_unscaled(model):
        return
    members = read_members(path)
    config = json.loads(members[_CONFIG])
    config["compile_config"]["auto_scale_loss"] = False
    write_members(path, {**members, _CONFIG: json.dumps(config).encode()})


def _describe(model: Any) -> dict[str, Any]:
    import keras

    settings = dict(model.get_compile_config() or {})
    if not settings or model.optimizer is None:
        return {}
    if settings.get("optimizer") is None:
        settings["optimizer"] = keras.saving.serialize_keras_object(model.optimizer)
    return settings | ({"auto_scale_loss": False} if _is_left_unscaled(model) else {})


def _is_left_unscaled(model: Any) -> bool:
    """Return whether a model of half precision was compiled with `auto_scale_loss=False`."""
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
                f"Keras cannot read the loss {loss!r} back from HDF5: use format='keras', or "
                "compile the model with a loss object, e.g. keras.losses.MeanSquaredError()"
            ) from error
    if isinstance(loss, dict) and "class_name" not in loss:
        return {name: _expand_names(item) for name, item in loss.items()}
    if isinstance(loss, (list, tuple)):
        return [_expand_names(item) for item in loss]
    return loss
