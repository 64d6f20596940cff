"""Assignment of rows to workers and steps: every row exactly once, and the same number of steps."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pybackend import InputError
from pybackend.core.data import sharding
from pybackend.core.data.sharding import (
    EpochOrder,
    SharedVisits,
    Visits,
    count_sharded,
    count_steps,
    count_used,
    cut_rows,
    cut_shards,
    permute,
    replay_batches,
    shard_slice,
)
from pybackend.core.job.report import Generation

counts_of_workers = st.lists(st.integers(0, 400), min_size=1, max_size=9).filter(any)
batch_sizes = st.integers(1, 70)
seeds = st.integers(0, 2**31 - 1)


def list_visits(count: int, seed: int, epoch: int, rank: int, shuffle: bool) -> Any:
    """Return the order in which a worker visits its rows in one epoch."""
    return Visits(count, seed, rank, shuffle).between(0, count, epoch)


@settings(deadline=None)
@given(counts_of_workers, batch_sizes, seeds, st.integers(0, 5), st.booleans())
def test_every_row_is_used_exactly_once_in_the_same_number_of_steps(
    counts: list[int], batch_size: int, seed: int, epoch: int, shuffle: bool
) -> None:
    steps = count_steps(counts, batch_size)
    for rank, count in enumerate(counts):
        edges = cut_rows(count, steps)
        visited = list_visits(count, seed, epoch, rank, shuffle)
        batches = [visited[edges[s] : edges[s + 1]] for s in range(steps)]
        assert sorted(np.concatenate(batches).tolist()) == list(range(count))
        assert max(map(len, batches)) <= batch_size
        # Unequal shards end at the same time: no worker idles at the end of an epoch.
        assert max(map(len, batches)) - min(map(len, batches)) <= 1


@settings(deadline=None)
@given(counts_of_workers, batch_sizes)
def test_no_smaller_number_of_steps_would_do(counts: list[int], batch_size: int) -> None:
    steps = count_steps(counts, batch_size)
    assert (steps - 1) * batch_size < max(counts) <= steps * batch_size


@settings(deadline=None)
@given(st.integers(1, 400), st.integers(1, 9), batch_sizes)
def test_shards_of_one_order_are_cut_as_keras_cuts_it(
    rows: int, workers: int, batch_size: int
) -> None:
    edges = cut_shards(count_sharded(rows, workers), batch_size)
    size = workers * batch_size
    for step, (first, last) in enumerate(zip(edges.T[:-1], edges.T[1:], strict=True)):
        parts = [
            np.arange(rows)[shard_slice(rows, workers, rank)][first[rank] : last[rank]]
            for rank in range(workers)
        ]
        own = np.arange(step * size, min(rows, (step + 1) * size))
        assert sorted(np.concatenate(parts).tolist()) == own.tolist()
        assert max(map(len, parts)) <= batch_size
    assert edges.shape == (workers, math.ceil(rows / size) + 1)


def test_shards_of_other_sizes_are_spread_over_the_steps() -> None:
    assert np.diff(cut_shards([10, 20], 8)).tolist() == [[3, 3, 4], [6, 7, 7]]


@settings(deadline=None)
@given(st.integers(0, 500), seeds, st.integers(0, 9), st.integers(0, 99))
def test_the_order_is_a_permutation_that_can_be_repeated(
    count: int, seed: int, epoch: int, rank: int
) -> None:
    visited = list_visits(count, seed, epoch, rank, shuffle=True)
    assert visited.dtype == np.int64
    assert sorted(visited.tolist()) == list(range(count))
    again = list_visits(count, seed, epoch, rank, shuffle=True)
    np.testing.assert_array_equal(visited, again)


def test_the_order_is_the_same_on_every_machine_and_version() -> None:
    assert list_visits(8, 7, 1, 2, shuffle=True).tolist() == [3, 2, 6, 0, 7, 4, 1, 5]


@settings(deadline=None)
@given(seeds, st.integers(0, 9), st.integers(0, 9))
def test_the_order_differs_by_seed_epoch_and_rank(seed: int, epoch: int, rank: int) -> None:
    one = list_visits(100, seed, epoch, rank, shuffle=True).tolist()
    assert one != list_visits(100, seed + 1, epoch, rank, shuffle=True).tolist()
    assert one != list_visits(100, seed, epoch + 1, rank, shuffle=True).tolist()
    assert one != list_visits(100, seed, epoch, rank + 1, shuffle=True).tolist()


@settings(deadline=None)
@given(st.data(), st.integers(0, 60), st.integers(0, 3), st.sampled_from([1, 2, 7]))
def test_parts_of_an_order_are_those_of_the_whole(
    data: Any, rows: int, rank: int, together: int
) -> None:
    whole = permute(np.arange(rows), rows, 3, 1, rank)
    first = data.draw(st.integers(0, rows))
    last = data.draw(st.integers(first, rows))
    with mock.patch.object(sharding, "_BLOCK", together):
        sharding._draw_block.cache_clear()
        visited = Visits(rows, 3, rank, True).between(first, last, 1)
    sharding._draw_block.cache_clear()
    assert visited.tolist() == whole[first:last].tolist()


def test_an_order_of_many_rows_is_a_permutation_in_any_parts() -> None:
    visits = Visits(20_000, 7, 0, True)
    found = np.concatenate([visits.between(a, a + 100, 0) for a in range(0, 20_000, 100)])
    assert sorted(found.tolist()) == list(range(20_000))
    assert found.tolist() == list_visits(20_000, 7, 0, 0, shuffle=True).tolist()


def test_without_shuffling_the_order_is_that_of_the_rows() -> None:
    assert list_visits(5, 1, 2, 3, shuffle=False).tolist() == [0, 1, 2, 3, 4]


@settings(deadline=None)
@given(st.integers(0, 300), st.integers(1, 12))
def test_dealt_rows_are_a_partition_with_sizes_that_differ_by_one(rows: int, workers: int) -> None:
    everything = np.arange(rows)
    shards = [everything[shard_slice(rows, workers, rank)] for rank in range(workers)]
    assert sorted(np.concatenate(shards).tolist()) == list(range(rows))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_sorted_rows_stay_mixed() -> None:
    labels = np.repeat(np.arange(10), 30)
    for rank in range(3):
        assert np.bincount(labels[shard_slice(300, 3, rank)]).tolist() == [10] * 10


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 6), batch_sizes, seeds, st.integers(0, 3), st.booleans())
def test_global_batches_are_a_partition_of_the_rows(
    rows: int, workers: int, batch_size: int, seed: int, epoch: int, shuffle: bool
) -> None:
    batches = replay_batches(rows, workers, batch_size, seed=seed, epoch=epoch, shuffle=shuffle)
    assert sorted(np.concatenate(batches).tolist()) == list(range(rows))
    size = workers * batch_size
    sizes = [min(size, rows - first) for first in range(0, rows, size)]
    assert [len(batch) for batch in batches] == sizes
    if not shuffle:
        assert np.concatenate(batches).tolist() == list(range(rows))


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_global_batch_is_what_the_workers_use_together(shuffle: bool) -> None:
    batches = replay_batches(10, 2, 3, seed=4, epoch=1, shuffle=shuffle)
    expected = []
    for first, last in ((0, 3), (3, 5)):
        used = []
        for rank in range(2):
            shard = np.arange(10)[shard_slice(10, 2, rank)]
            used += shard[list_visits(5, 4, 1, rank, shuffle)][first:last].tolist()
        expected.append(sorted(used))
    assert [sorted(batch.tolist()) for batch in batches] == expected


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rows", "10"),
        ("rows", 0),
        ("workers", 1.5),
        ("workers", []),
        ("workers", [1]),
        ("files", "yes"),
        ("batch_size", -1),
        ("seed", None),
        ("epoch", -1),
        ("shuffle", "globl"),
    ],
)
def test_what_cannot_be_replayed_is_refused(name: str, value: Any) -> None:
    right: dict[str, Any] = {"rows": 10, "workers": 2, "batch_size": 4, "seed": 1, "epoch": 0}
    with pytest.raises(InputError, match=f"`{name}` must be"):
        replay_batches(**{**right, name: value})


groups_of_workers = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), max_size=3)


@settings(deadline=None)
@given(
    st.integers(1, 300),
    groups_of_workers,
    st.integers(1, 6),
    batch_sizes,
    st.sampled_from([True, False, "global"]),
)
def test_each_row_is_used_once_if_workers_are_lost_at_any_steps(
    rows: int, lost: list[tuple[int, int]], last: int, batch_size: int, shuffle: Any
) -> None:
    generations, groups = [Generation(1, list(range((lost or [(last, 0)])[0][0])))], []
    for number, (workers, steps) in enumerate(lost):
        left = rows - sum(count_used(rows, groups, batch_size))
        if count_steps(count_sharded(left, workers), batch_size) <= steps:
            break  # the next epoch begins
        groups.append((workers, steps))
        after = lost[number + 1][0] if number + 1 < len(lost) else last
        step = 1 + sum(taken for _, taken in groups)
        generations.append(Generation(1, list(range(after)), step=step))
    options: Any = {"seed": 3, "epoch": 0, "shuffle": shuffle}
    batches = replay_batches(rows, generations, batch_size, **options)
    assert sorted(np.concatenate(batches).tolist()) == list(range(rows))
    whole = replay_batches(rows, len(generations[0].workers), batch_size, **options)
    taken = groups[0][1] if groups else len(whole)
    for one, other in zip(batches[:taken], whole[:taken], strict=True):
        assert one.tolist() == other.tolist()
    # What each worker of the last group reads by itself.
    used = sum(count_used(rows, groups, batch_size))
    order = EpochOrder(rows, 3, shuffle, len(generations[0].workers))
    workers, steps = len(generations[-1].workers), sum(taken for _, taken in groups)
    edges = cut_shards(count_sharded(rows - used, workers), batch_size)
    for step, expected in enumerate(batches[steps:]):
        shares = [
            SharedVisits(order, used, workers, rank).between(own[step], own[step + 1], 0)
            for rank, own in enumerate(edges)
        ]
        assert max(map(len, shares)) <= batch_size
        assert sorted(np.concatenate(shares).tolist()) == sorted(expected.tolist())


def test_the_share_of_all_rows_is_that_of_a_worker_with_its_own_rows() -> None:
    for shuffle in (True, False):
        visits = SharedVisits(EpochOrder(20, 5, shuffle, 3), 0, 3, 1).between(0, 7, 2)
        assert visits.tolist() == (Visits(7, 5, 1, shuffle).between(0, 7, 2) * 3 + 1).tolist()
    shared = SharedVisits(EpochOrder(20, 5, "global", 3), 0, 3, 1).between(0, 7, 2)
    assert shared.tolist() == permute(np.arange(1, 20, 3)[:7], 20, 5, 2).tolist()


def test_batches_of_a_data_set_are_shared_by_those_that_are_left() -> None:
    assert count_used(20, [(3, 1), (2, 2)], 5, [4, 5, 6, 5]) == [4, 5, 6]
    assert np.diff(cut_shards([8, 8], 5, [5, 6, 5])).sum(axis=0).tolist() == [5, 6, 5]
