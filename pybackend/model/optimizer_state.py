"""Write, read or remove the optimizer's state (momenta, step count) in model files.

Keras 3 restores an optimizer from its own group of an HDF5 file with no variables to update: the
next `fit` fails with "Unknown variable". So the state is stored in a separate group, and Keras's
group is removed before Keras reads it (a loaded model then starts with a fresh optimizer).
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pybackend.errors import SerializationError

_GROUP = "tfdist_optimizer_state"
_KERAS_GROUP = "optimizer_weights"


def write_optimizer_state(path: Path, optimizer: Any) -> None:
    """Add the variables of a built optimizer to an HDF5 file."""
    import h5py

    with h5py.File(path, "r+") as file:
        group = file.create_group(_GROUP)
        for index, variable in enumerate(optimizer.variables):
            group.create_dataset(str(index), data=variable.numpy().astype(_stored_type(variable)))


def remove_keras_optimizer_state(path: Path) -> None:
    """Remove the state that Keras wrote to an HDF5 file, if any."""
    import h5py

    with h5py.File(path, "r+") as file:
        if _KERAS_GROUP in file:
            del file[_KERAS_GROUP]


def restore_optimizer_state(path: Path, model: Any) -> None:
    """Restore the optimizer's state of a loaded model from its HDF5 file, if there is one.

    Raises
    ------
    SerializationError
        The state does not belong to this optimizer; the model is unchanged.
    """
    import h5py

    with h5py.File(path, "r") as file:
        group = file.get(_GROUP)
        if group is None:
            return
        model.optimizer.build(model.trainable_variables)
        variables = model.optimizer.variables
        datasets = _find_datasets(group, len(variables), model)
        for variable, dataset in zip(variables, datasets, strict=True):
            _check_dataset(dataset, variable)
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
            f"{received[0]} for {variable.path!r}, expected {expected[1]} of shape {expected[0]}: "
            "the file was altered. Save the model again"
        )


def _stored_type(variable: Any) -> np.dtype[Any]:
    """Return the type in which a variable is stored: HDF5 has no bfloat16."""
    return np.dtype("float32" if variable.dtype == "bfloat16" else variable.dtype)


def drop_optimizer_state(path: Path) -> None:
    """Remove the optimizer's state from the weights inside a ``.keras`` file."""
    import h5py

    members = read_members(path)
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
    write_members(path, members)


def read_members(path: Path) -> dict[str, bytes]:
    """Return the contents of the members of a ``.keras`` file, by name."""
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def write_members(path: Path, members: Mapping[str, bytes]) -> None:
    """Write a ``.keras`` file of these members."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
