"""Batches whose arrays have different numbers of rows: graphs with a label each."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from conftest import largest_difference

from pybackend import InputError, WorkerFailedError, barrier_train

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
