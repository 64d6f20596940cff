"""Seconds of a call's checks before training, compared with writing the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from rounds import median_seconds
from step import network

_ROWS = 32


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Medians, for the small network with rows of images."""
    import keras

    from pybackend.core.engine.statistics.probes import (
        find_unsummable_metrics,
        is_mean_in_evaluation,
    )
    from pybackend.core.model.serialization import model_to_bytes
    from pybackend.core.model.transfer import encode_file
    from pybackend.core.model.view import ModelView

    generator = np.random.default_rng(0)
    images = generator.random((_ROWS, 28, 28, 1), dtype="float32")
    rows = images, generator.integers(0, 10, _ROWS)
    model = network(keras)
    parts: dict[str, Callable[[], Any]] = {
        "driver: write the model": lambda: model_to_bytes(model, format="keras"),
        "driver: write, read and compare it": lambda: encode_file(
            ModelView(model), {}, True, "train", rows
        ),
        "worker: try the loss of an evaluation": lambda: is_mean_in_evaluation(
            ModelView(model), rows
        ),
        "worker: try the metrics": lambda: find_unsummable_metrics(model, rows),
    }
    return {name: {"seconds": s} for name, s in median_seconds(parts, rounds).items()}
