"""The job that each tool does: 1,001 rows for two workers, 32 rows per worker and step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
ROWS, FEATURES, HIDDEN = 1001, 20, 32
WORKERS, BATCH, EPOCHS, RATE = 2, 32, 20, 0.1


def rows() -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return features of shape (rows, features), and targets of shape (rows, 1)."""
    random = np.random.default_rng(0)
    x = random.normal(size=(ROWS, FEATURES)).astype("float32")
    return x, np.sin(x.sum(axis=1, keepdims=True)).astype("float32")


def weights() -> list[npt.NDArray[np.float32]]:
    """Return the first weights, of shape (inputs, outputs), and biases of two dense layers."""
    random = np.random.default_rng(1)
    first = random.normal(0, 0.2, (FEATURES, HIDDEN)).astype("float32")
    second = random.normal(0, 0.2, (HIDDEN, 1)).astype("float32")
    return [first, np.zeros(HIDDEN, "float32"), second, np.zeros(1, "float32")]


def train_alone(batches: list[npt.NDArray[np.int64]]) -> list[Array]:
    """Train in one process, in float64, on row numbers for each step; return the weights.

    Two layers, the first with tanh; mean squared error; gradient descent.
    """
    x, y = (one.astype("float64") for one in rows())
    w1, b1, w2, b2 = (one.astype("float64") for one in weights())
    for batch in batches:
        inputs, targets = x[batch], y[batch]
        hidden = np.tanh(inputs @ w1 + b1)
        error = 2 * (hidden @ w2 + b2 - targets) / len(batch)
        back = (error @ w2.T) * (1 - hidden**2)
        w1, b1 = w1 - RATE * inputs.T @ back, b1 - RATE * back.sum(axis=0)
        w2, b2 = w2 - RATE * hidden.T @ error, b2 - RATE * error.sum(axis=0)
    return [w1, b1, w2, b2]


def may_die(rank: int, epoch: int) -> None:
    """Kill this process in the middle of the job if ``TOOLS_KILL`` names a file; note the time."""
    note = os.environ.get("TOOLS_KILL")
    if note and rank == 1 and epoch == EPOCHS // 2:
        Path(note).write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
