"""The model of a job, in a worker: from the file or the function that the driver sent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import keras

from pybackend.errors import InputError
from pybackend.job import EXTRAS, MODEL_FILE, MODEL_FUNCTION, Job
from pybackend.serialization import model_from_bytes


@dataclass(frozen=True)
class Loaded:
    """A model, and what else came from the driver: ``callbacks`` and ``custom_objects``."""

    model: Any
    extras: dict[str, Any]


def load(job: Job, folder: Path) -> Loaded:
    """Set Keras up as on the driver, and load the model."""
    keras.config.set_floatx(job.floatx)
    keras.config.set_dtype_policy(job.dtype_policy)
    keras.config.set_image_data_format(job.image_data_format)
    # A function of the user's builds the same weights on all ranks.
    keras.utils.set_random_seed(job.seed)
    extras = _unpickled(folder / EXTRAS) or {}
    return Loaded(_model(job, folder, extras.get("custom_objects")), extras)


def _unpickled(path: Path) -> Any:
    """Read a file that the launcher on this machine wrote from the driver's own objects."""
    return cloudpickle.loads(path.read_bytes()) if path.exists() else None


def _model(job: Job, folder: Path, custom_objects: Any) -> Any:
    if job.model_source == "function":
        model = _unpickled(folder / MODEL_FUNCTION)()
        if not isinstance(model, keras.Model):
            raise InputError(
                f"the `model` function returned {type(model).__name__}, not a Keras model"
            )
        return model
    return model_from_bytes(
        (folder / MODEL_FILE).read_bytes(),
        custom_objects=custom_objects,
        safe_mode=job.safe_mode,
    )
