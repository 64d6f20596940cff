"""The cost model: its formulas, and the algorithm that it chooses."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybackend.core.collective import CostModel
from pybackend.core.collective.algorithms import measure

TEN_GIGABITS = CostModel(25e-6, 0.8e-9, 0.05e-9)


def test_ring() -> None:
    model = CostModel(10.0, 2.0, 1.0)
    # Six rounds, in total 2 * 3/4 of the bytes, 3/4 of them added.
    assert model.predict_ring(100, 4) == 6 * 10 + 150 * 2 + 75


@pytest.mark.parametrize(("ranks", "rounds"), [(2, 1), (4, 2), (8, 3), (1024, 10)])
def test_doubling(ranks: int, rounds: int) -> None:
    assert CostModel(10.0, 2.0, 1.0).predict_doubling(100, ranks) == rounds * (10 + 200 + 100)


def test_folding_costs_two_messages_and_an_addition() -> None:
    assert CostModel(10.0, 2.0, 1.0).predict_doubling(100, 5) == 2 * 310 + 2 * 210 + 100


@given(
    ranks=st.integers(2, 1024),
    figures=st.tuples(*[st.floats(1e-13, 1e-3)] * 3),
)
def test_small_is_doubled_and_large_goes_round(
    ranks: int, figures: tuple[float, float, float]
) -> None:
    model = CostModel(*figures)
    assert model.choose(0, ranks) == "doubling"
    if ranks > 2:
        assert model.choose(1e18, ranks) == "ring"


def test_a_network_switches_at_some_hundred_kilobytes() -> None:
    assert TEN_GIGABITS.choose(1024, 8) == "doubling"
    assert TEN_GIGABITS.choose(16 << 20, 8) == "ring"


def test_predictions_grow_with_ranks_and_bytes() -> None:
    for cost in (TEN_GIGABITS.predict_ring, TEN_GIGABITS.predict_doubling):
        by_ranks = [cost(1e6, 2**k) for k in range(1, 11)]
        assert by_ranks == sorted(by_ranks)
        assert cost(2e6, 8) > cost(1e6, 8)


def test_measured_figures_are_means_over_ranks() -> None:
    sizes = []

    def doubling(buffer: np.ndarray) -> None:
        sizes.append(buffer.nbytes)
        buffer *= 2  # as if the other rank had measured the same

    model = measure(doubling, 2)
    assert sorted(set(sizes)) == [8, 24, 1 << 20]
    assert all(
        math.isfinite(figure) and figure > 0
        for figure in (
            model.latency_seconds,
            model.seconds_per_byte,
            model.add_seconds_per_byte,
        )
    )
