"""Any distribution of rows over the workers gives the result of one process."""

from __future__ import annotations

import itertools
from typing import Any

import keras
import numpy as np
import pytest
from replicas import Case, check_equal, sampled
from test_exact_cases import dense

WORKERS, SPREADS = 3, 5
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.01),
    "adam": lambda: keras.optimizers.Adam(0.01),
}


def shards(rng: np.random.Generator, rows: int) -> list[slice]:
    """Draw random ranges of the rows; sometimes a worker has no rows."""
    cuts = np.sort(rng.integers(0, rows + 1, WORKERS - 1))
    if rng.random() < 0.4:
        cuts[:] = rng.choice([0, rows, cuts[0]])
    edges = [0, *cuts.tolist(), rows]
    return [slice(a, b) for a, b in itertools.pairwise(edges)]


def regularized(optimizer: Any) -> Any:
    """Return a builder of a model with a regularizer, which must not count once per worker."""

    def build() -> Any:
        model = dense(optimizer=optimizer)()
        layer = keras.layers.Dense(3, kernel_regularizer=keras.regularizers.L2(0.01))
        together = keras.Sequential([keras.Input((8,)), *model.layers[:-1], layer])
        together.compile(optimizer(), model.loss, metrics=["accuracy"])
        return together

    return build


def cases() -> dict[str, Case]:
    found = {}
    for name, optimizer in OPTIMIZERS.items():
        for number in range(SPREADS):
            rng = np.random.default_rng([number, len(name)])
            rows = int(rng.integers(1, 70))
            x = rng.normal(size=(rows, 8)).astype("float32")
            data = (x, rng.integers(0, 3, rows), rng.random(rows).astype("float32"))
            found[f"{name} {number}"] = Case(
                regularized(optimizer),
                data if number % 2 else data[:2],
                batch_size=int(rng.integers(1, 12)),
                settings={"shuffle": False},
                tolerance=1e-5,
                shards=shards(rng, rows),
            )
    return found


CASES = cases()


def test_some_workers_have_no_rows() -> None:
    sizes = [[part.stop - part.start for part in case.shards or []] for case in CASES.values()]
    assert sum(0 in each for each in sizes) >= 3


@pytest.mark.parametrize("name", sampled(CASES, 1))
def test_any_spread_of_rows_is_exact(name: str, trained: dict[str, Any]) -> None:
    check_equal(CASES[name], trained[name])
