"""Plain networks on tables of every scale, not normalized: rounding is all that may differ."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from auditing.models import LOGITS, compiled
from auditing.subject import Subject

layers = keras.layers
_RNG = np.random.default_rng(31)
COLUMNS: dict[str, Callable[[int], Any]] = {
    "ones": lambda n: np.ones((n, 1)),
    "one-hot": lambda n: np.eye(6)[_RNG.integers(0, 6, n)],
    "0 to 255": lambda n: _RNG.integers(0, 256, (n, 4)),
    "years": lambda n: _RNG.integers(1990, 2026, (n, 2)),
    "seconds since 1970": lambda n: _RNG.integers(1_600_000_000, 1_700_000_000, (n, 1)),
    "money": lambda n: np.round(_RNG.lognormal(8, 2, (n, 2)), 2),
    "flags": lambda n: _RNG.integers(0, 2, (n, 3)),
    "normal": lambda n: _RNG.normal(size=(n, 3)),
}
# Columns, rows per worker, optimizer and kind of model.
KINDS: list[tuple[tuple[str, ...], int, str, str]] = [
    (("ones", "normal"), 2, "SGD", "classifier"),
    (("ones", "normal"), 200, "Adam", "classifier"),
    (("one-hot",), 4, "SGD", "regressor"),
    (("one-hot",), 50, "Adam", "classifier"),
    (("one-hot", "ones"), 1000, "SGD", "classifier"),
    (("one-hot", "flags"), 3000, "Adam", "binary"),
    (("0 to 255",), 8, "SGD", "classifier"),
    (("0 to 255",), 64, "Adam", "classifier"),
    (("0 to 255", "one-hot"), 2000, "SGD", "binary"),
    (("0 to 255",), 4000, "Adam", "regressor"),
    (("years",), 16, "SGD", "regressor"),
    (("years", "one-hot"), 128, "Adam", "classifier"),
    (("years", "ones"), 1000, "SGD", "binary"),
    (("years", "money"), 4000, "Adam", "classifier"),
    (("seconds since 1970",), 8, "Adam", "regressor"),
    (("seconds since 1970", "flags"), 100, "SGD", "classifier"),
    (("seconds since 1970", "one-hot"), 2000, "Adam", "binary"),
    (("money",), 2, "Adam", "binary"),
    (("money", "flags"), 32, "SGD", "regressor"),
    (("money", "one-hot"), 500, "Adam", "regressor"),
    (("money",), 5000, "SGD", "classifier"),
    (("flags",), 10, "Adam", "binary"),
    (("flags", "normal"), 8000, "SGD", "classifier"),
    (("normal",), 8000, "Adam", "classifier"),
    (("years", "one-hot", "0 to 255"), 8000, "SGD", "classifier"),
    (("ones", "one-hot", "years", "money", "flags"), 300, "Adam", "regressor"),
    (("ones", "one-hot", "years", "money", "flags"), 6000, "SGD", "binary"),
    (("ones", "one-hot", "0 to 255"), 20_000, "Adam", "classifier"),
    (("one-hot", "normal"), 50_000, "SGD", "classifier"),
    (("years", "flags"), 50_000, "Adam", "regressor"),
]


def network(width: int, kind: str, optimizer: str) -> Callable[[], Any]:
    """Return a builder of a network for a table."""

    def build() -> Any:
        units = 3 if kind == "classifier" else 1
        model = keras.Sequential(
            [
                keras.Input((width,)),
                layers.Dense(16, "relu"),
                layers.Dense(8, "relu"),
                layers.Dense(units),
            ]
        )
        losses = {
            "classifier": LOGITS,
            "regressor": "mse",
            "binary": keras.losses.BinaryCrossentropy(from_logits=True),
        }
        metrics = ["mae"] if kind == "regressor" else ["accuracy"]
        return compiled(model, optimizer=optimizer.lower(), loss=losses[kind], metrics=metrics)

    return build


def table(columns: tuple[str, ...], rows: int, optimizer: str, kind: str) -> Subject:
    """Return a training on a table: two steps in each of two epochs, one if batches are large."""
    count = 2 * rows * (1 if rows > 5000 else 2)
    x = np.concatenate([COLUMNS[name](count) for name in columns], axis=1).astype("float32")
    y = {
        "classifier": lambda: _RNG.integers(0, 3, count),
        "binary": lambda: _RNG.integers(0, 2, (count, 1)).astype("float32"),
        "regressor": lambda: _RNG.normal(100, 20, (count, 1)).astype("float32"),
    }[kind]()
    build = network(x.shape[1], kind, optimizer)
    return Subject(build, (x, y), batch_size=rows, is_comparable=False)


TABLES = {
    f"{' and '.join(columns)}, {rows} rows, {optimizer}, {kind}": table(
        columns, rows, optimizer, kind
    )
    for columns, rows, optimizer, kind in KINDS
}
