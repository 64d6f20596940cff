"""Checks that processes which make one call together agree on it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
from conftest import build_dense

from pybackend import Exchange
from pybackend.core.data.arrays import Ragged
from pybackend.core.data.columns import ColumnSpec
from pybackend.core.data.sources import FileRows
from pybackend.core.job.job import EXTRAS, MODEL_FILE, SOURCE, TrainingJob
from pybackend.core.launchers.joined.gathering import (
    describe_call,
    describe_columns,
    find_disagreement,
)

PEERS = ["worker 0 (a:1)", "worker 1 (b:1)"]
ROWS = {"x": np.zeros((4, 2), "float32"), "y": np.arange(4)}


def describe(number: int = 1, files: Any = (), rows: Any = ROWS, **job: Any) -> Any:
    """Return the claims of a training."""
    return describe_call(number, TrainingJob(2, **job), dict(files), {"train": rows})


def differ(**other: Any) -> str | None:
    """Return how the call of a second process differs from `describe`'s own."""
    return find_disagreement(PEERS, [describe(), describe(**other)])


@pytest.mark.parametrize("own", [{}, {"seed": 3}, {"verbose": 0}, {"timeout": 9.0}])
def test_what_may_differ(own: Any) -> None:
    assert differ(**own) is None


@pytest.mark.parametrize(
    ("other", "found"),
    [
        ({"epochs": 3}, "`epochs` is 3 in worker 1 (b:1), but 1 in worker 0 (a:1)"),
        ({"exchange": Exchange(compression="bf16")}, "`exchange` is"),
        ({"model_uri": "/m.h5"}, "`model_uri` is 'a path'"),
        (
            {"number": 2},
            "worker 1 (b:1) is at call number 2, but worker 0 (a:1) is at call number 1",
        ),
        (
            {"files": {"objects.pkl": b""}},
            "worker 1 (b:1) passes objects.pkl, worker 0 (a:1) passes none",
        ),
        ({"rows": {"x": ROWS["x"][:3], "y": ROWS["y"][:3]}}, "`data` has 3 rows in worker 1"),
        (
            {"rows": {**ROWS, "y": ROWS["y"][::-1]}},
            "`y` of `data` has different values in worker 1",
        ),
        (
            {"rows": {**ROWS, "y": ROWS["y"].astype("int32")}},
            "`y` of `data` is int32 (4,) in worker 1 (b:1), but int64 (4,) in worker 0 (a:1)",
        ),
        ({"rows": {"x": ROWS["x"]}}, "`y` of `data` is absent in worker 1"),
    ],
)
def test_what_differs_is_named(other: Any, found: str) -> None:
    assert found in str(differ(**other))


def test_rows_that_only_some_pass() -> None:
    without = describe_call(1, TrainingJob(2), {}, {})
    message = find_disagreement(PEERS, [describe(), without])
    assert "worker 0 (a:1) passes `data` as arrays, worker 1 (b:1) does not" in str(message)


def test_columns_are_the_same_however_they_lie_in_memory() -> None:
    moved = {**ROWS, "x": np.asfortranarray(ROWS["x"])}
    assert describe_columns(moved) == describe_columns(ROWS)
    assert differ(rows=dict(reversed(ROWS.items()))) is None
    ragged = Ragged(np.arange(3), np.array([0, 1, 3]))
    other = Ragged(np.arange(3), np.array([0, 2, 3]))
    assert describe_columns({"x": ragged}) != describe_columns({"x": other})


def test_models_are_compared_by_structure_and_settings(tmp_path: Path) -> None:
    import keras

    def model(units: int = 3, rate: float = 0.1) -> Any:
        inputs = keras.Input((8,))
        hidden = keras.layers.Dense(4)(inputs)
        built = keras.Model(inputs, keras.layers.Dense(units)(hidden))
        built.compile(keras.optimizers.SGD(rate), "mse")
        return built

    def claims(built: Any) -> Any:
        path = tmp_path / "model.keras"
        built.save(path)
        return describe(files={MODEL_FILE: path.read_bytes()})

    first = claims(model())
    # Keras numbers layers: the same network, built again, has other names.
    assert find_disagreement(PEERS, [first, claims(model())]) is None
    for other in (model(units=4), model(rate=0.2), build_dense()):
        assert "in its structure, or in the arguments of compile()" in str(
            find_disagreement(PEERS, [first, claims(other)])
        )


def test_files_are_compared_by_name_rows_size_and_what_is_read_of_them(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    def claims(folder: str, rows: int, spec: ColumnSpec) -> Any:
        path = tmp_path / folder / "rows.parquet"
        path.parent.mkdir(exist_ok=True)
        columns = {"a": np.arange(rows, dtype="float32"), "label": np.zeros(rows, "int64")}
        pq.write_table(pa.table(columns), path)
        source = FileRows.at(path, spec, "float32", "data")
        return describe(files={f"train{SOURCE}": cloudpickle.dumps(source)})

    spec = ColumnSpec()
    first = claims("one", 5, spec)
    assert find_disagreement(PEERS, [first, claims("two", 5, spec)]) is None
    other = claims("three", 6, spec)
    assert "the files `data` of worker 1 (b:1)" in str(find_disagreement(PEERS, [first, other]))
    other = claims("two", 5, ColumnSpec(features=["label"], label="a"))
    assert "worker 1 (b:1) reads different columns" in str(find_disagreement(PEERS, [first, other]))


def test_callbacks_are_compared_by_class_and_numbers() -> None:
    from keras.callbacks import EarlyStopping, TerminateOnNaN

    def claims(*callbacks: Any) -> Any:
        content = {"callbacks": list(callbacks), "custom_objects": {}}
        return describe(files={EXTRAS: cloudpickle.dumps(content)})

    first = claims(EarlyStopping("loss", patience=2))
    assert find_disagreement(PEERS, [first, claims(EarlyStopping("loss", patience=2))]) is None
    for other in (claims(EarlyStopping("loss", patience=3)), claims(TerminateOnNaN())):
        assert "`callbacks` of worker 1" in str(find_disagreement(PEERS, [first, other]))
