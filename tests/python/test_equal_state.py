"""Weights of workers that differ by rounding, or by something else."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from test_collective import mesh, together

from pybackend.core.engine.equal_state import find_differing_weights, undo_drift

NONE: Any = np.nan


def build() -> Any:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3)])
    model.compile(keras.optimizers.Adam())
    model.optimizer.build(model.trainable_variables)
    kernel, bias = model.trainable_variables
    kernel.assign([[1.0, 2.0, 3.0], [4.0, 5.0, NONE]])
    bias.assign([1.0, 0.0, 0.0])
    return model


def drift(moves: dict[int, tuple[Any, float]], ranks: int = 3) -> list[tuple[Any, Any, Any]]:
    """Return each rank's state before and after, with its model, after moving variables."""
    models = [build() for _ in range(ranks)]
    for rank, (choose, size) in moves.items():
        choose(models[rank]).assign_add(np.full(choose(models[rank]).shape, size, "float32"))
    with mesh(ranks) as members:
        return together(
            members,
            lambda member: (
                find_differing_weights(models[member.rank], member),
                undo_drift(models[member.rank], member),
                models[member.rank],
            ),
        )


def bias(model: Any) -> Any:
    return model.trainable_variables[1]


def kernel(model: Any) -> Any:
    return model.trainable_variables[0]


def momentum(model: Any) -> Any:
    return model.optimizer.variables[-1]


def values(model: Any) -> list[Any]:
    return [v.numpy() for v in [*model.weights, *model.optimizer.variables]]


def test_rounding_is_undone_on_all_ranks() -> None:
    found = drift({1: (bias, 1e-5), 2: (momentum, 0.5)})
    for before, (after, size), model in found:
        assert list(before) == [1]
        assert after == {}
        assert size == pytest.approx(1e-5 * 3**0.5, rel=1e-3)
        for one, other in zip(values(model), values(build()), strict=True):
            np.testing.assert_array_equal(one, other)


def test_equal_ranks_are_left_alone() -> None:
    assert [(before, after) for before, after, _ in drift({})] == [({}, ({}, 0.0))] * 3


@pytest.mark.parametrize(
    ("moves", "names"),
    [
        ({2: (bias, 0.01)}, {2: "bias"}),
        ({1: (kernel, 0.1), 2: (bias, NONE)}, {1: "kernel", 2: "bias"}),
    ],
)
def test_what_is_more_than_rounding_is_found(moves: Any, names: dict[int, str]) -> None:
    for before, (after, _), _ in drift(moves):
        assert after == before
        assert {rank: path.rpartition("/")[2] for rank, path in after.items()} == names
