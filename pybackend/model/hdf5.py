"""What Keras leaves undone in HDF5 files: compile settings, optimizer state, damage without end."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

from pybackend.errors import SerializationError

# Reads what Keras will read, all names and attributes.
_TRIAL = """
import sys, h5py
with h5py.File(sys.argv[1], "r") as file:
    dict(file.attrs)
    file.visititems(lambda name, item: dict(item.attrs) and None)
"""
_TRIAL_SECONDS = 20.0


def refuse_endless(path: Path) -> None:
    """Refuse a damaged HDF5 file in which the HDF5 library would loop for ever.

    Another process tries it, as nothing else can end such a loop. Not needed where a digest has
    shown the file to be intact; other damage is found by the reading itself.
    """
    try:
        subprocess.run(
            [sys.executable, "-c", _TRIAL, str(path)],
            capture_output=True,
            timeout=_TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SerializationError(
            f"the model file is corrupted: reading it did not end within {_TRIAL_SECONDS:g} s"
        ) from error


def keras_version(path: Path) -> str:
    """Version of Keras that wrote a model file; an error where it holds no model."""
    import h5py

    with h5py.File(path, "r") as file:
        if "model_config" not in file.attrs:
            raise SerializationError(
                "the HDF5 file holds no model: expected one written by `model_to_base64` "
                "or `model.save`, with its architecture, not weights alone"
            )
        version = file.attrs.get("keras_version", "")
        return version.decode() if isinstance(version, bytes) else str(version)


# Keras 3 restores an optimizer from its own HDF5 group with no variables to update: the next
# `fit` fails with "Unknown variable". So the state lives in a group of ours, and Keras's is
# removed before Keras sees it (a loaded model then starts with a fresh optimizer).
_STATE = "tfdist_optimizer_state"


def write_compile_settings(path: Path, model: Any, include_optimizer: bool) -> None:
    """Add a model's compile settings to its file, and its optimizer's state where wanted."""
    import h5py

    if not model.compiled:
        return
    settings = dict(model.get_compile_config() or {})
    optimizer = settings.pop("optimizer", None)
    if optimizer is None:
        return
    settings["optimizer_config"] = optimizer
    settings["loss"] = _by_full_name(settings.get("loss"))
    with h5py.File(path, "r+") as file:
        file.attrs["training_config"] = json.dumps(settings).encode()
        if include_optimizer and model.optimizer.built:
            group = file.create_group(_STATE)
            for index, variable in enumerate(model.optimizer.variables):
                group.create_dataset(str(index), data=variable.numpy())


def _by_full_name(loss: Any) -> Any:
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
        return {name: _by_full_name(item) for name, item in loss.items()}
    if isinstance(loss, (list, tuple)):
        return [_by_full_name(item) for item in loss]
    return loss


def take_optimizer_state(path: Path) -> list[Any]:
    """Remove the optimizer's state from a file before Keras reads it, and return it."""
    import h5py

    with h5py.File(path, "r+") as file:
        group = file.get(_STATE, {})
        state = [group[str(index)][()] for index in range(len(group))]
        for name in ("optimizer_weights", _STATE):
            if name in file:
                del file[name]
        return state


def drop_optimizer_state(path: Path) -> None:
    """Remove the optimizer's state from the weights inside a ``.keras`` file."""
    import h5py

    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    weights = io.BytesIO(members["model.weights.h5"])
    with h5py.File(weights, "r+") as file:
        if "optimizer" not in file:
            return
        # A loss-scaling optimizer has another one inside.
        stored: list[str] = []
        file["optimizer"].visit(stored.append)
        for name in stored:
            if name.rpartition("/")[0].endswith("vars"):
                del file["optimizer"][name]
    members["model.weights.h5"] = weights.getvalue()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
