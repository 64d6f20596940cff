"""One of two processes that train together; prints its outcome as a line of JSON.

``python soak_worker.py INDEX ADDRESS,ADDRESS STEPS TIMEOUT``.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

import pybackend

BATCH, STEPS_PER_EPOCH = 8, 250


def build() -> Any:
    """Return a small network, from a fixed seed."""
    import keras

    keras.utils.set_random_seed(1)
    dense = keras.layers.Dense
    model = keras.Sequential([keras.Input((8,)), dense(64, activation="relu"), dense(3)])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.SGD(0.05, momentum=0.9), loss)
    return model


def train(spark: Any, steps: int, timeout: float = 300.0) -> Any:
    """Run the same training for every caller."""
    rng = np.random.default_rng(0)
    count = 2 * BATCH * min(steps, STEPS_PER_EPOCH)
    rows = rng.normal(size=(count, 8)).astype("float32"), rng.integers(0, 3, count)
    epochs = max(1, steps // STEPS_PER_EPOCH)
    return pybackend.barrier_train(
        spark,
        build,
        rows,
        workers=2,
        batch_size=BATCH,
        epochs=epochs,
        seed=1,
        recovery=pybackend.Recovery(timeout=timeout),
        verbose=0,
    )


def main(index: str, addresses: str, steps: str, timeout: str) -> None:
    """Train, and print the digest of the weights or the error."""
    pybackend.join(addresses.split(","), int(index))
    try:
        result = train(None, int(steps), float(timeout))
    except pybackend.TfdistError as error:
        print(json.dumps({"error": type(error).__name__, "message": str(error)}), flush=True)
    else:
        found = {"digest": result.workers[0].weights_sha256, "steps": result.workers[0].steps}
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
