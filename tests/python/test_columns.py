"""Columns of each tensor, and invalid column specs."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from pybackend.core import words
from pybackend.core.api.call_data import narrow_columns
from pybackend.core.api.calls import (
    EvaluationCall,
    ModelCall,
    PredictionCall,
    TrainedModel,
    TrainingCall,
)
from pybackend.core.api.model_columns import choose_columns
from pybackend.core.data.column_groups import group_columns
from pybackend.core.data.columns import ColumnKind, ColumnSpec, check_column_spec, list_columns
from pybackend.core.data.frames import FrameRows
from pybackend.core.data.rows import StoredRows
from pybackend.core.data.sources import FileRows
from pybackend.core.errors import InputError
from pybackend.core.job.storage_options import DataOptions

KINDS = {
    "a": ColumnKind("number", "float32", 0, "float"),
    "n": ColumnKind("number", "int32", 0, "int"),
    "v": ColumnKind("number", "float64", 1, "array<double>"),
    "b": ColumnKind("binary", None, 0, "binary"),
    "t": ColumnKind("text", None, 0, "string"),
    "d": ColumnKind("other", None, 0, "date"),
    "label": ColumnKind("number", "int64", 0, "bigint"),
}


def chosen(**choice: Any) -> Any:
    return group_columns(ColumnSpec(**choice), KINDS, "float32", "data")


def test_a_list_is_one_input_and_a_mapping_several() -> None:
    column_groups = chosen(features=["v", "a"])
    assert [(group.key, group.columns) for group in column_groups] == [
        ("x", ("v", "a")),
        ("y", ("label",)),
    ]
    assert list_columns(column_groups) == ["v", "a", "label"]
    column_groups = chosen(features={"left": ["a", "n"], "right": "a", "text": "t"}, weight="v")
    assert [(group.key, group.columns, group.dtype) for group in column_groups] == [
        ("x/left", ("a", "n"), "float32"),
        ("x/right", ("a",), "float32"),
        ("x/text", ("t",), "str"),
        ("y", ("label",), "int64"),
        ("sample_weight", ("v",), "float32"),
    ]


def test_several_outputs_have_several_labels() -> None:
    column_groups = chosen(features=["a"], label={"one": "label", "two": "n"})
    assert [group.key for group in column_groups] == ["x", "y/one", "y/two"]


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"features": ["zz"]}, "`data` has no column 'zz': its columns are a, n"),
        ({"features": ["a"], "label": "zz"}, "`data` has no column 'zz'"),
        ({"features": ["a"], "weight": "zz"}, "`data` has no column 'zz'"),
        ({"features": ["a"], "tensors": {"zz": ("uint8", (1,))}}, "(it is in `tensors`)"),
        ({"features": ["a", "label"]}, "'label' is given as both the label and a feature"),
        ({"features": ["a"], "weight": "label"}, "'label' is given as both the weight and the"),
        ({"features": ["a"], "weight": "a"}, "'a' is given as both the weight and a feature"),
        ({"features": ["d"]}, "column 'd' of `data` has type date; expected numbers"),
        ({"features": ["a", "t"]}, "text needs `categories` or must be a separate input"),
        ({"features": ["a"], "label": "t"}, "the label column 't' of `data` has type string"),
        (
            {"features": ["b"], "tensors": {"b": ("uint8", (None,))}},
            "column 'b' of `data` has type binary; expected one bytes value per row",
        ),
        (
            {"features": ["t"], "tensors": {"t": ("uint8", (2,))}},
            "column 't' of `data` has type string; expected numbers or bytes",
        ),
        (
            {"features": ["a", "b"], "tensors": {"b": ("uint8", (2,))}},
            "`tensors` has 'b', which is one of the columns a, b of a single input: it "
            "must be a separate",
        ),
        (
            {"features": ["n"], "tensors": {"n": ("uint8", (1,))}, "categories": {"n": [1]}},
            "'n' is in both `tensors` and `categories`",
        ),
        (
            {"features": ["v"], "categories": {"v": [1]}},
            "column 'v' of `data` has type array<double>; expected one value per row",
        ),
    ],
)
def test_columns_that_are_not_there_or_not_of_use_are_rejected(choice: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        chosen(**choice)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"label": 3}, "`label` must be the name of a column, not 3"),
        ({"label": ["a"]}, "`label` must be the name of a column"),
        ({"features": 3}, "`features` must be names of columns, not 3"),
        ({"features": ["a", 1]}, "`features` must be names of columns"),
        ({"features": []}, "`features` must be names of columns"),
        ({"features": {"a/b": "c"}}, "`features` has an entry named 'a/b'"),
        ({"weight": 1}, "`weight` must be the name of a column, not 1"),
    ],
)
def test_a_wrong_spec_is_rejected_before_any_table_is_looked_at(choice: Any, message: str) -> None:
    with pytest.raises(InputError) as caught:
        check_column_spec(ColumnSpec(**choice))
    assert message in str(caught.value)


DAY = "convert its times, e.g. to days since a day, "
PARTS = ", or the month or weekday, month() and dayofweek(), or leave the column out of `features`"


@pytest.mark.parametrize(
    ("kind", "language", "expected"),
    [
        ("date", "Python", f"df.withColumn('t', F.datediff('t', F.lit('2020-01-01'))){PARTS}"),
        ("date", "R", f'mutate(data, t = datediff(t, to_date("2020-01-01"))){PARTS}'),
        (
            "timestamp_ntz",
            "Python",
            "df.withColumn('t', (F.unix_timestamp('t') - F.unix_timestamp(F.lit('2020-01-01'), "
            f"'yyyy-MM-dd')) / 86400){PARTS}",
        ),
        (
            "timestamp",
            "R",
            'mutate(data, t = (unix_timestamp(t) - unix_timestamp("2020-01-01", "yyyy-MM-dd")) / '
            f"86400){PARTS}",
        ),
    ],
)
def test_times_of_spark_are_converted_in_its_words(
    kind: str, language: words.Language, expected: str
) -> None:
    kinds = {"t": ColumnKind("other", None, 0, kind)}
    words.speak(language)
    try:
        with pytest.raises(InputError) as caught:
            group_columns(ColumnSpec(label=None), kinds, "float32", "data")
    finally:
        words.speak("Python")
    start = "column 't'" if language == "Python" else 'column "t"'
    message = f"{start} of `data` has type {kind}; expected numbers: {DAY}{expected}"
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("struct<a:int>", "name the fields to use, e.g. features=['t.a']"),
        ("struct<a: int64>", "and name those to use, e.g. features=['t.a']"),
        ("interval day to second", "the difference of their unix_timestamp(), or"),
    ],
)
def test_other_columns_say_how_they_become_numbers(kind: str, expected: str) -> None:
    kinds = {"t": ColumnKind("other", None, 0, kind)}
    with pytest.raises(InputError, match=re.escape(expected)):
        group_columns(ColumnSpec(label=None), kinds, "float32", "data")


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
    known: dict[str, Any] = {
        "features": ["size", "color"],
        "tensors": None,
        "categories": {"color": ["red", "green", "blue"]},
        "encode": {"color": "one_hot"},
        "levels": None,
    }
    result = type("Known", (TrainedModel,), known)()
    spec = choose_columns(replace(call, model=result))
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
