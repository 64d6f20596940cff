"""Keras's global settings, as the job of a call has them."""

from __future__ import annotations

import sys
from typing import Any

from pybackend.errors import InputError

# Settings by which Keras ends trainings early, and our arguments for it.
_LIMITS = {"max_epochs": "epochs", "max_steps_per_epoch": "steps_per_epoch"}


def read_keras_defaults() -> dict[str, Any]:
    """Keras's global settings, which can differ from its defaults only if Keras is loaded.

    Raises
    ------
    InputError
        Keras is to end each training early, as for a trial: workers would not know.
    """
    keras = sys.modules.get("keras")
    if keras is None:
        return {}
    for setting, argument in _LIMITS.items():
        limit = getattr(keras.config, setting, lambda: None)()  # Keras 3.12 has none
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
