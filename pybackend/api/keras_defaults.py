"""Keras's global settings, as the job of a call has them."""

from __future__ import annotations

import sys
from typing import Any


def read_keras_defaults() -> dict[str, Any]:
    """Keras's global settings, which can differ from its defaults only if Keras is loaded."""
    keras = sys.modules.get("keras")
    if keras is None:
        return {}
    return {
        "floatx": keras.config.floatx(),
        "dtype_policy": keras.config.dtype_policy().name,
        "image_data_format": keras.config.image_data_format(),
    }
