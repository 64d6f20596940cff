"""One small job for every route and both languages, and the weights that one process reaches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
JOB = json.loads((HERE / "job.json").read_text())


def arrays() -> tuple[Any, Any]:
    """Rows made without random numbers, so that R can make the same ones."""
    import numpy as np

    row, column = np.arange(JOB["rows"])[:, None], np.arange(JOB["features"])[None]
    x = ((row * 7 + column * 13) % 23) / 23 - 0.5
    return x.astype("float32"), (np.arange(JOB["rows"]) * 5 % JOB["classes"]).astype("int32")


def build() -> Any:
    """The model of the scenario, built by Python."""
    import keras

    first, second = (keras.initializers.GlorotUniform(seed=s) for s in JOB["kernel_seeds"])
    model = keras.Sequential(
        [
            keras.Input((JOB["features"],)),
            keras.layers.Dense(JOB["units"], activation="relu", kernel_initializer=first),
            keras.layers.Dense(JOB["classes"], kernel_initializer=second),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(JOB["learning_rate"]), loss, metrics=["accuracy"])
    return model


def r_source() -> str:
    """The model of the scenario, as the source text of an R function."""
    job = json.dumps((HERE / "job.json").read_text())
    model = (HERE / "model.R").read_text()
    return f"function() {{\njob <- jsonlite::fromJSON({job})\nbuild <- {model}\nbuild()\n}}"


def arguments() -> dict[str, Any]:
    """What `barrier_train` is called with, besides where, what and on which rows."""
    return {name: JOB[name] for name in ("workers", "epochs", "batch_size", "seed")}


def expected() -> list[Any]:
    """The weights after the same global batches in this one process, by Keras alone."""
    from pybackend.core.data.sharding import replay_batches

    x, y = arrays()
    model = build()
    for epoch in range(JOB["epochs"]):
        for rows in replay_batches(
            len(x), JOB["workers"], JOB["batch_size"], seed=JOB["seed"], epoch=epoch
        ):
            model.train_on_batch(x[rows], y[rows])
    return list(model.get_weights())


def difference(weights: Any) -> float:
    """Largest absolute difference between these weights and the expected ones."""
    import numpy as np

    pairs = zip(weights, expected(), strict=True)
    return max(float(np.abs(np.asarray(a) - b).max()) for a, b in pairs)
