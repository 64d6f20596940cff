"""Local batches of a worker: of its rows, for any number read at once, and of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import largest_difference
from hypothesis import given, settings
from hypothesis import strategies as st

from pybackend import InputError, WorkerFailedError, barrier_train
from pybackend.core.data.arrays import Ragged
from pybackend.core.data.row_store import RowStoreWriter, write_columns
from pybackend.core.data.rows import ArrayRows, StoredRows
from pybackend.core.data.sharding import (
    Visits,
    count_sharded,
    count_steps,
    cut_shards,
    replay_batches,
)
from pybackend.core.engine import row_batches as module
from pybackend.core.engine.row_batches import RowBatches
from pybackend.core.job.report import Generation

WIDTH = 3


def rows_of(count: int) -> dict[str, Any]:
    return {"x": np.arange(count * WIDTH, dtype=np.float32).reshape(count, WIDTH)}


@settings(deadline=None, max_examples=40)
@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(any),
    st.integers(1, 9),
    st.sampled_from([1, 30, 200, 2 << 20]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 2),
)
def test_batches_are_cut_as_the_sharding_says(
    counts: list[int],
    batch_size: int,
    block_bytes: int,
    shuffle: bool,
    is_limited: bool,
    first_epoch: int,
) -> None:
    full = count_steps(counts, batch_size)
    limit = (full + 1) // 2 if is_limited else None
    rank = int(np.argmax(counts)) if is_limited else len(counts) - 1
    with mock.patch.object(module, "_BLOCK_BYTES", block_bytes):
        columns = rows_of(counts[rank])
        feed = RowBatches(columns, counts, rank, batch_size, seed=5, shuffle=shuffle, limit=limit)
        batches = feed.dataset()
        edges = cut_shards(counts, batch_size)[rank]
        assert int(batches.cardinality()) == feed.steps == (limit or full)
        visits = Visits(counts[rank], 5, rank, shuffle)
        orders = [visits.between(0, counts[rank], first_epoch + number) for number in range(3)]
        parts = [order[edges[step] : edges[step + 1]] for order in orders for step in range(full)]
        for number in range(3):
            feed.begin_epoch(first_epoch + number)
            found = [x.numpy() for x in batches]
            assert len(found) == feed.steps
            for step, x in enumerate(found):
                part = parts[number * feed.steps + step]
                np.testing.assert_array_equal(x, columns["x"][part])
                assert feed.rows_at(step)[rank] == len(part)
            assert feed.total_rows.shape == (feed.steps,)


@settings(deadline=None, max_examples=40)
@given(
    st.data(),
    st.integers(1, 60),
    st.integers(1, 3),
    st.integers(1, 9),
    st.sampled_from([True, False, "global", "elastic", "uneven"]),
    st.booleans(),
)
def test_a_ledger_has_each_row_once_in_its_step(
    data: Any, rows: int, workers: int, batch_size: int, shuffle: Any, is_limited: bool
) -> None:
    counts = count_sharded(rows, workers)
    if shuffle == "uneven":
        counts = counts[::-1]
        counts[-1] += 3
    has_all = shuffle in ("global", "elastic")
    full = cut_shards(counts, batch_size).shape[1] - 1
    options: Any = {"seed": 5, "limit": (full + 1) // 2 if is_limited else None}
    options |= {"shuffle": shuffle if shuffle in (False, "global") else True}
    feeds = [
        RowBatches(
            rows_of(sum(counts) if has_all else counts[rank]),
            counts,
            rank,
            batch_size,
            has_all=shuffle == "elastic",
            **options,
        )
        for rank in range(workers)
    ]
    for epoch in range(2):
        steps = feeds[0].steps
        first = data.draw(st.integers(0, steps - 1))
        last = data.draw(st.integers(first + 1, steps))
        for feed in feeds:
            feed.begin_epoch(epoch)
            list(feed.dataset(first))
        found = [feed.compare_rows(first, last) for feed in feeds]
        assert not np.sum(found, axis=0, dtype=np.uint64).any()
    for feed in feeds:
        feed.begin_epoch(1)
        list(feed.dataset())
    rank = int(np.argmax(counts))
    step = max(n for n in range(feeds[0].steps) if feeds[0].rows_at(n)[rank])
    feeds[rank]._ledger.note(step, np.array([0]), np.array([0, 1]))  # a row more
    found = [feed.compare_rows(0, feed.steps) for feed in feeds]
    assert np.flatnonzero(np.sum(found, axis=0, dtype=np.uint64)).tolist() == [step]


@pytest.mark.parametrize("kept_bytes", [0, 500, 40 << 20])
def test_rows_of_a_spool_come_from_its_map_and_its_file(tmp_path: Path, kept_bytes: int) -> None:
    columns = {**rows_of(100), "y": np.arange(100)}
    write_columns(tmp_path / "rows", columns)
    with (
        mock.patch("pybackend.core.data.rows._MAPPED_BYTES", kept_bytes),
        mock.patch.object(module, "_BLOCK_BYTES", 300),
    ):
        batches = RowBatches(StoredRows(tmp_path / "rows"), [100], 0, 7, shuffle=True).dataset()
    seen = [(x.numpy(), y.numpy()) for x, y in batches]
    x, y = (np.concatenate(parts) for parts in zip(*seen, strict=True))
    assert sorted(y.tolist()) == list(range(100))
    np.testing.assert_array_equal(x, columns["x"][y])


def test_texts_count_by_their_letters(tmp_path: Path) -> None:
    """Otherwise a block of texts would be many times as large as one of numbers."""
    texts = [b"a" * 1000] * 50
    values = np.frombuffer(b"".join(texts), np.uint8)
    with RowStoreWriter(tmp_path / "rows") as writer:
        offsets = np.arange(51) * 1000
        writer.append({"x": Ragged(values, offsets, is_text=True), "y": np.arange(50)})
    strings = np.array(texts, object).reshape(50, 1)
    spooled, held = StoredRows(tmp_path / "rows"), ArrayRows({"x": strings, "y": np.arange(50)})
    assert spooled.row_bytes == held.row_bytes == 1000 + 64 + 8
    np.testing.assert_array_equal(spooled.take(np.arange(50))["x"], strings)


@settings(deadline=None, max_examples=20)
@given(
    st.integers(3, 60),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 4),
    st.sampled_from([True, False, "global"]),
)
def test_other_workers_read_the_rest_of_an_epoch(
    rows: int, before: int, after: int, batch_size: int, shuffle: Any
) -> None:
    whole = replay_batches(rows, before, batch_size, seed=5, epoch=2, shuffle=shuffle)
    taken = len(whole) // 2
    if not taken:
        return
    generations = [
        Generation(1, list(range(before))),
        Generation(3, list(range(after)), step=taken + 1),
    ]
    expected = replay_batches(rows, generations, batch_size, seed=5, epoch=2, shuffle=shuffle)
    columns, counts = rows_of(rows), count_sharded(rows, after)
    shares = []
    for rank in range(after):
        feed = RowBatches(columns, counts, rank, batch_size, seed=5, shuffle=shuffle, has_all=True)
        feed.resume(0)
        feed.continue_epoch(2, [(before, taken)])
        rest, next_one = feed.dataset(taken), feed.dataset()
        feed.begin_epoch(2)
        assert feed.steps == taken + int(rest.cardinality()) == len(expected)
        assert feed.total_rows.tolist() == [len(batch) for batch in expected]
        assert feed.taken == taken
        shares.append([x.numpy() for x in rest])
        for number, x in enumerate(shares[-1], start=taken):
            assert feed.rows_at(number)[rank] == len(x)
        feed.begin_epoch(3)
        assert feed.taken == 0
        assert sum(len(x) for x in next_one) == counts[rank]
    for batch, parts in zip(expected[taken:], zip(*shares, strict=True), strict=True):
        found = np.concatenate(parts)
        wanted = columns["x"][batch]
        assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, wanted.tolist()))


@pytest.mark.parametrize(
    ("steps", "epochs", "begins_again"), [(3, 2, True), (2, 2, False), (4, 9, False), (3, 1, False)]
)
def test_rows_that_run_out_within_an_epoch(steps: int, epochs: int, begins_again: bool) -> None:
    feed = RowBatches({"x": np.zeros((8, 1))}, [8], 0, 2, limit=steps)
    assert feed.begins_again(epochs) is begins_again


# --- batches whose arrays have different numbers of rows: graphs with a label each ---

SPEC = (
    (tf.TensorSpec([None, 3]), tf.TensorSpec([None], tf.int64)),
    tf.TensorSpec([None, 1]),
)


class Molecules(keras.utils.PyDataset):
    """Return atoms with the molecule of each; 8, 8 and 1 molecules, or a worker's part."""

    def __init__(self, rank: int = 0, workers: int = 1) -> None:
        super().__init__()
        generator = np.random.default_rng(3)
        sizes = generator.integers(1, 7, 17)
        atoms = [generator.normal(size=(size, 3)).astype("float32") for size in sizes]
        self.batches = [list(range(first, last)) for first, last in ((0, 8), (8, 16), (16, 17))]
        self.batches = [part for batch in self.batches if (part := batch[rank::workers])]
        self.atoms = atoms
        self.labels = generator.normal(size=(17, 1)).astype("float32")

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        chosen = self.batches[index]
        atoms = [self.atoms[place] for place in chosen]
        owners = np.repeat(np.arange(len(chosen)), [len(each) for each in atoms])
        return (np.concatenate(atoms), owners), self.labels[chosen]


class Sums(keras.Model):
    """Sums its outputs for the atoms of a molecule."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = keras.layers.Dense(4, "tanh"), keras.layers.Dense(1)

    def call(self, x: Any) -> Any:
        return self.outer(tf.math.segment_sum(self.inner(x[0]), x[1]))


def build(eagerly: bool = False) -> Any:
    keras.utils.set_random_seed(4)
    model = Sums()
    model.compile("adam", "mse", metrics=["mae"], run_eagerly=eagerly)
    return model


def own_molecules(context: Any) -> Any:
    own = Molecules(context.rank, context.world_size)
    batches = lambda: (own[number] for number in range(len(own)))  # noqa: E731
    return tf.data.Dataset.from_generator(batches, output_signature=SPEC)


@pytest.mark.parametrize("eagerly", [False, True])
@pytest.mark.full
def test_graphs_train_as_in_one_process(eagerly: bool, caplog: Any) -> None:
    with caplog.at_level("INFO", "tfdist"):
        result = barrier_train(
            None, lambda: build(eagerly), own_molecules, workers=2, epochs=2, verbose=0
        )
    model = build(eagerly)
    history = model.fit(Molecules(), epochs=2, shuffle=False, verbose=0).history
    assert largest_difference(model, result.model) <= 1e-6
    for name, values in history.items():
        np.testing.assert_allclose(result.history[name], values, rtol=1e-5)
    assert [worker.rows for worker in result.workers] == [9, 8]
    assert "weighted by the rows of `y`" in caplog.text
    assert result.audit.steps == 0
    assert "cannot be concatenated across the workers" in result.audit.skipped[0]


def test_what_else_takes_graphs_is_told() -> None:
    with pytest.raises(InputError, match=r"\(x/#0: 2., x/#1: 2., y: 8\).* each graph .* function"):
        barrier_train(None, build, Molecules(), workers=2, verbose=0)
    with pytest.raises(WorkerFailedError, match=r"`validation_data` has arrays of .* `evaluate`"):
        barrier_train(
            None, build, own_molecules, workers=2, validation_data=own_molecules, verbose=0
        )
