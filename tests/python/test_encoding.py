"""Text, and whole numbers that are categories, as codes or one-hot."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pybackend.core.api.calls import EvaluationCall, ModelCall, PredictionCall, TrainingCall
from pybackend.core.api.datasets import narrow_columns
from pybackend.core.api.model_columns import choose_columns
from pybackend.core.data.columns import ColumnSpec
from pybackend.core.data.frames import FrameRows
from pybackend.core.data.rows import StoredRows
from pybackend.core.data.sources import FileRows
from pybackend.core.errors import InputError
from pybackend.core.job.storage_options import DataOptions

FRAME = pd.DataFrame(
    {
        "size": [0.5, 1.5, 2.5, 3.5],
        "color": ["red", "blue", "red", "green"],
        "year": [2021, 2020, 2021, 2021],
        "label": [0, 1, 0, 1],
    }
)
ONE_HOT = np.array([[0, 0, 1], [1, 0, 0], [0, 0, 1], [0, 1, 0]])


def read(frame: Any = FRAME, **spec: Any) -> FrameRows:
    return FrameRows.of(frame, ColumnSpec(**spec), "float32", "data")


def test_text_beside_numbers_is_one_hot_in_the_order_of_its_sorted_values() -> None:
    rows = read(features=["size", "color"])
    assert rows.columns["x"].dtype == np.float32
    np.testing.assert_array_equal(rows.columns["x"], np.column_stack([FRAME["size"], ONE_HOT]))
    summary = rows.summary
    assert summary["features"] == ["size", "color"]
    assert summary["feature_names"] == ["size", "color_blue", "color_green", "color_red"]
    assert summary["categories"] == {"color": ["blue", "green", "red"]}
    assert summary["encode"] == {"color": "one_hot"}


def test_codes_are_for_embeddings_and_whole_numbers_can_be_one_hot() -> None:
    spec: Any = {"features": {"color": "color", "year": ["year"], "size": ["size"]}}
    rows = read(**spec, encode={"color": "integer", "year": "one_hot"})
    np.testing.assert_array_equal(rows.columns["x/color"], [[2], [0], [2], [1]])
    np.testing.assert_array_equal(rows.columns["x/year"], [[0, 1], [1, 0], [0, 1], [0, 1]])
    assert rows.columns["x/color"].dtype == rows.columns["x/year"].dtype == np.int32
    assert rows.summary["feature_names"]["year"] == ["year_2020", "year_2021"]
    both = read(features=["color"], categories={"color": ["red", "green", "blue"]})
    np.testing.assert_array_equal(both.columns["x"], [[0], [2], [0], [1]])


def test_validation_data_have_the_values_of_the_training() -> None:
    trained = read(features=["size", "color"])
    later = FRAME.assign(color=["red", "red", "blue", "blue"])
    rows = FrameRows.of(later, narrow_columns(trained.spec, trained), "float32", "validation_data")
    np.testing.assert_array_equal(rows.columns["x"][:, 1:], ONE_HOT[[0, 0, 1, 1]])
    with pytest.raises(
        InputError, match=r"column 'color' contains 'pink' in row 0 .*its categories"
    ):
        FrameRows.of(FRAME.assign(color="pink"), rows.spec, "float32", "validation_data")
    with pytest.raises(InputError, match="column 'size' contains text, but numbers in `data`"):
        FrameRows.of(FRAME.assign(size="a"), rows.spec, "float32", "validation_data")
    with pytest.raises(InputError, match="needs the same codes as in training"):
        read(features=["size", "color"], finds_levels=False)


@pytest.mark.parametrize(
    "call",
    [
        TrainingCall(spark=None, data=None, model=None, options={"label": "year"}),
        EvaluationCall(model=None, options={"label": "year"}),
        PredictionCall(model=None, options={}),
    ],
    ids=lambda call: type(call).__name__,
)
def test_what_the_training_of_a_result_read_as_numbers_is_no_text_later(call: ModelCall) -> None:
    result = SimpleNamespace(
        features=["size", "color"],
        tensors=None,
        categories={"color": ["red", "green", "blue"]},
        encode={"color": "one_hot"},
        levels=None,
    )
    spec = choose_columns(call, DataOptions(), result)
    rows = FrameRows.of(FRAME, spec, "float32", "data")
    np.testing.assert_array_equal(rows.columns["x"][:, 1:].argmax(axis=1), [0, 2, 0, 1])
    coded = FRAME.assign(size=FRAME["size"].astype("category"))
    later = FrameRows.of(coded, spec, "float32", "data")
    np.testing.assert_array_equal(later.columns["x"], rows.columns["x"])
    with pytest.raises(
        InputError, match="column 'size' contains text, but numbers in the training"
    ):
        FrameRows.of(FRAME.assign(size="a"), spec, "float32", "data")


def test_files_are_encoded_alike(tmp_path: Path) -> None:
    FRAME.to_parquet(tmp_path / "rows.parquet")
    spec = ColumnSpec(features=["size", "color"])
    files = FileRows.at(tmp_path / "rows.parquet", spec, "float32", "data")
    files.spool(tmp_path / "spool", 1, 0, True)
    found = StoredRows(tmp_path / "spool").take(np.arange(4))["x"]
    np.testing.assert_array_equal(found, read(features=["size", "color"]).columns["x"])


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            {"encode": {"color": "one_hot", "zz": "integer"}},
            "'zz', which is not one of the features",
        ),
        ({"encode": {"size": "one_hot"}}, "`encode` has 'size', which has type double"),
        ({"features": ["size", "name"]}, "'name' has more than 1,000 values, too many to encode"),
    ],
)
def test_what_cannot_be_encoded_is_named(spec: Any, message: str) -> None:
    many = pd.DataFrame({"name": [str(n) for n in range(1001)], "size": 1.0, "label": 0})
    with pytest.raises(InputError, match=message):
        read(many if "name" in spec.get("features", ()) else FRAME, **spec)


@pytest.mark.parametrize("encode", ["onehot", {"a": "dummy"}, 1, {1: "one_hot"}])
def test_other_encodings_are_rejected(encode: Any) -> None:
    with pytest.raises(InputError, match="`encode` must"):
        DataOptions(encode=encode)
