"""A model's compile settings in an HDF5 file.

Keras, writing them, removes the optimizer from the model's own settings and uses short names of
losses that it cannot read back.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pybackend.errors import SerializationError


def write_compile_settings(path: Path, model: Any) -> None:
    """Add the settings of a compiled model to its file."""
    import h5py

    settings = dict(model.get_compile_config() or {})
    optimizer = settings.pop("optimizer", None)
    if optimizer is None:
        return
    settings["optimizer_config"] = optimizer
    settings["loss"] = _expand_names(settings.get("loss"))
    with h5py.File(path, "r+") as file:
        file.attrs["training_config"] = json.dumps(settings).encode()


def _expand_names(loss: Any) -> Any:
    """A compile setting of losses without short names: Keras cannot read "mse" from HDF5."""
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
