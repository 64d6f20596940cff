"""What users of Keras's fit expect of a training: a share of the rows validates, data frames."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pandas as pd
import pytest
import tensorflow as tf
from conftest import full, largest_difference

from pybackend import InputError, barrier_predict, barrier_train

LEVELS = ["cat", "dog", "owl"]


def test_a_pandas_frame_gives_what_its_arrays_give(rows: Any, dense_model: Any) -> None:
    x, y = rows
    frame = pd.DataFrame({f"c{n}": x[:, n] for n in range(8)})
    frame["animal"] = np.array(LEVELS)[y]
    common: Any = {"workers": 2, "batch_size": 50, "seed": 1, "verbose": 0, "validation_split": 0.2}
    arrays = barrier_train(None, dense_model, rows, **common)
    result = barrier_train(None, dense_model, frame, label="animal", **common)
    assert largest_difference(arrays.model, result.model) == 0
    assert result.history == arrays.history
    assert (result.levels, result.features) == (LEVELS, [f"c{n}" for n in range(8)])
    assert [worker.rows for worker in result.workers] == [200, 200]
    expected = result.model.evaluate(x[400:], y[400:], verbose=0)[0]
    assert result.history["val_loss"] == pytest.approx([expected], abs=1e-6)
    # The result knows its columns, in their order.
    shuffled = frame[["animal", *[f"c{n}" for n in reversed(range(8))]]][:40]
    predicted = barrier_predict(None, result, shuffled, workers=2, verbose=0)
    np.testing.assert_allclose(predicted, result.model.predict(x[:40], verbose=0), atol=1e-6)


class Halves(keras.utils.PyDataset):
    """The rows in batches of 70, the last of which is smaller."""

    def __init__(self, x: Any, y: Any) -> None:
        super().__init__()
        self.rows = x, y

    def __len__(self) -> int:
        return -(-len(self.rows[0]) // 70)

    def __getitem__(self, index: int) -> Any:
        return tuple(part[70 * index : 70 * (index + 1)] for part in self.rows)


@pytest.mark.parametrize("kind", ["tf.data", full("PyDataset")])
def test_a_data_set_is_cut_over_the_workers(rows: Any, dense_model: Any, kind: str) -> None:
    x, y = rows[0][:301], rows[1][:301]
    data: Any = Halves(x, y)
    if kind == "tf.data":
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(70)
    result = barrier_train(
        None, dense_model, data, workers=2, epochs=2, validation_data=data, verbose=0
    )
    history = dense_model.fit(data, epochs=2, shuffle=False, verbose=0).history
    assert largest_difference(dense_model, result.model) <= 1e-6
    assert sum(worker.rows for worker in result.workers) == 301
    np.testing.assert_allclose(result.history["loss"], history["loss"], atol=1e-6)
    expected = dense_model.evaluate(data, verbose=0)[0]
    assert result.history["val_loss"][-1] == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"validation_split": 0.5}, "`data` is a data set: use another data set"),
        ({"steps_per_epoch": 2}, r"a data set of 5 batches: leave it out, and use data.take\(2\)"),
        ({"workers": 302}, "`data` has 301 rows, fewer than workers=302"),
    ],
)
def test_arguments_that_do_not_go_with_a_data_set(
    rows: Any, dense_model: Any, arguments: Any, message: str
) -> None:
    data = Halves(rows[0][:301], rows[1][:301])
    with pytest.raises(InputError, match=message):
        barrier_train(None, dense_model, data, **arguments)
