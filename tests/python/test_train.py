"""What users of Keras's fit expect of a training: a share of the rows validates, data frames."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from conftest import largest_difference

from pybackend import barrier_predict, barrier_train

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
