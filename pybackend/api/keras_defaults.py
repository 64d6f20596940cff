"""Keras's global settings, as fields of a job."""

from __future__ import annotations

import sys
from typing import Any

from pybackend.errors import InputError

# Settings with which Keras ends trainings early, and the arguments that replace them.
_LIMITS = {"max_epochs": "epochs", "max_steps_per_epoch": "steps_per_epoch"}


def read_keras_defaults() -> dict[str, Any]:
    """Return Keras's global settings; they can differ from the defaults only if Keras is loaded.

    Raises
    ------
    InputError
        A setting ends each training early, which workers would not know.
    """
    keras = sys.modules.get("keras")
    if keras is None:
        return {}
    for setting, argument in _LIMITS.items():
        limit = getattr(keras.config, setting, lambda: None)()  # Keras 3.12 lacks it
        if limit is not None:
            raise InputError(
                f"keras.config.{setting}() is {limit}, which ends each training of this session "
                f"early: call keras.config.set_{setting}(None), and pass `{argument}`"
            )
    return {
        "epsilon": keras.config.epsilon(),
        "floatx": keras.config.floatx(),
        "dtype_policy": keras.config.dtype_policy().name,
        "image_data_format": keras.config.image_data_format(),
    }
