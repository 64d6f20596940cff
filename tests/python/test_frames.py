"""Data frames of pandas, polars, Arrow and DuckDB as training data."""

from __future__ import annotations

import datetime
import re
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import scipy.sparse

from pybackend.core.api.call_data import narrow_columns
from pybackend.core.data.arrays import Ragged, flatten_data
from pybackend.core.data.columns import ColumnSpec, check_column_spec
from pybackend.core.data.frames import FrameRows, holds_frame, is_frame
from pybackend.core.data.row_store import write_columns
from pybackend.core.data.rows import StoredRows
from pybackend.core.data.sources import FileRows
from pybackend.core.data.spark_rows import describe_layout
from pybackend.core.errors import InputError

ROWS = 300
RNG = np.random.default_rng(3)


def table(rows: int = ROWS) -> pd.DataFrame:
    """Return a column of each type that a model can use."""
    return pd.DataFrame(
        {
            "height": RNG.normal(size=rows),
            "count": RNG.integers(0, 9, rows).astype("int32"),
            "is_new": RNG.integers(0, 2, rows).astype(bool),
            "pixels": list(RNG.normal(size=(rows, 6)).astype("float32")),
            "image": [bytes(row) for row in RNG.integers(0, 256, (rows, 4), dtype=np.uint8)],
            "words": [list(range(n % 5)) for n in range(rows)],
            "title": [f"título {n}" for n in range(rows)],
            "colour": RNG.choice(["red", "green", "blue"], rows),
            "animal": RNG.choice(["cat", "dog"], rows),
            "weight": RNG.uniform(size=rows),
        }
    )


SPECS = {
    "numbers": ColumnSpec(["height", "count", "is_new"], "animal"),
    "arrays": ColumnSpec(["pixels"], "count", weight="weight"),
    "bytes": ColumnSpec(["image"], "animal", tensors={"image": ("<u2", (2, 1))}),
    "ragged": ColumnSpec(["words"], "animal", tensors={"words": ("int64", (None,))}),
    "categories": ColumnSpec(
        ["height", "colour"],
        {"kind": "animal", "number": "count"},
        categories={"colour": ["blue", "green", "red"], "animal": ["dog", "cat"]},
    ),
    "inputs": ColumnSpec({"left": ["height", "count"], "right": "pixels"}, "animal"),
    "text": ColumnSpec({"title": "title", "numbers": ["height"]}, "animal"),
}


@pytest.mark.parametrize("name", SPECS)
def test_columns_are_those_of_a_parquet_file_of_it(name: str, tmp_path: Path) -> None:
    frame = table()
    frame.to_parquet(tmp_path / "rows.parquet", index=False)
    files = FileRows.at(tmp_path / "rows.parquet", SPECS[name], "float32", "data")
    files.spool(tmp_path / "files", 1, 0, everything=True)
    own = FrameRows.of(frame, SPECS[name], "float32", "data")
    assert (own.rows, own.summary) == (ROWS, files.summary)
    write_columns(tmp_path / "frame", own.columns)
    one, other = StoredRows(tmp_path / "files"), StoredRows(tmp_path / "frame")
    assert one.spec == other.spec
    everything = np.arange(ROWS)
    expected, found = one.take(everything), other.take(everything)
    for key in expected:
        assert np.array_equal(expected[key], found[key]), key


def test_a_label_of_text_becomes_codes_in_sorted_order() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0, 3.0], "label": pd.Categorical(["b", "c", "a"])})
    rows = FrameRows.of(frame, ColumnSpec(), "float32", "data")
    assert rows.columns["y"].tolist() == [1, 2, 0]
    assert rows.summary["levels"] == ["a", "b", "c"]
    assert rows.summary["features"] == ["a"]
    assert rows.columns["x"].dtype == "float32"
    validation = ColumnSpec(["a"], categories={"label": ["a", "b", "c"]}, finds_levels=False)
    assert FrameRows.of(frame[:1], validation, "float32", "data").columns["y"].tolist() == [1]


def test_arrays_of_several_dimensions_keep_their_numbers() -> None:
    images = RNG.integers(0, 256, (5, 2, 3, 2)).astype("uint8")
    frame = pd.DataFrame({"image": list(images), "label": range(5)})
    spec = ColumnSpec(tensors={"image": ("uint8", (2, 3, 2))})
    assert np.array_equal(FrameRows.of(frame, spec, "float32", "data").columns["x"], images)


def test_only_columns_that_are_used_must_be_usable() -> None:
    frame = pd.DataFrame({"a": [1, 2], "label": [0, 1], "odd": [1, "two"]})
    rows = FrameRows.of(frame, ColumnSpec(["a"]), "float32", "data")
    assert rows.columns["x"].tolist() == [[1], [2]]
    with pytest.raises(InputError, match="'odd' of `data` has values of different types"):
        FrameRows.of(frame, ColumnSpec(), "float32", "data")


MISTAKES = {
    "null": (
        {"a": pd.array([1] * 3 + [None, 5], "Int64"), "label": range(5)},
        r"column 'a' has 1 null\(s\), first in row 3 \(counting from 0\): drop or fill",
    ),
    "missing text": ({"a": range(3), "label": ["x", None, "y"]}, "column 'label' .* in row 1 "),
    "missing Int64": (
        {"a": range(3), "label": pd.array([1, 2, None], "Int64")},
        "column 'label' .* in row 2 ",
    ),
    "lengths": ({"a": [[1], [1, 2]], "label": [0, 1]}, "'a' has 2 numbers in row 1 .*expected 1"),
    "dates": (
        {"a": pd.to_datetime(["2026-01-01"]), "label": [0]},
        "'a' of `data` has type timestamp",
    ),
    "misspelt": ({"a": [1], "labl": [0]}, "no column 'label'.*: did you mean 'labl'. Its columns"),
    "no label": ({"a": [1], "b": [0]}, "`data` has no column 'label'.*: its columns are a, b"),
    "names": ({0: [1], "label": [0]}, "`data` has a column named 0: column names must be text"),
    "no rows": ({"a": [], "label": []}, "`data` has no rows"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_named(name: str) -> None:
    values, message = MISTAKES[name]
    with pytest.raises(InputError, match=message):
        FrameRows.of(pd.DataFrame(values), ColumnSpec(), "float32", "data")


def test_nan_is_left_to_the_model() -> None:
    frame = pd.DataFrame({"a": [1.0, np.nan], "b": [1, 2], "label": [0, 1]})
    found = FrameRows.of(frame, ColumnSpec(), "float32", "data").columns["x"]
    np.testing.assert_array_equal(found, [[1, 1], [np.nan, 2]])
    with pytest.raises(InputError, match="label column 'label' contains NaN in row 1 "):
        FrameRows.of(frame.assign(label=[0, np.nan]), ColumnSpec(), "float32", "data")


def test_incomplete_rows_can_be_left_out() -> None:
    """Use rows with a null, also within an array, or with a value outside the categories."""
    frame = pd.DataFrame(
        {
            "a": pd.array([1, None, 3, 4, 5], "Int64"),
            "c": ["x", "y", "z", "y", "x"],
            "v": [[1.0, 2.0]] * 4 + [[None, 1.0]],
            "f": [1.0, 2.0, 3.0, 4.0, 5.0],
        }
    )
    spec = ColumnSpec(label=None, categories={"c": ["x", "y"]}, encode={"c": "one_hot"})

    def read(rows: Any) -> FrameRows:
        return FrameRows.of(rows, spec, "float32", "x", skips_incomplete=True)

    found = read(frame)
    assert found.complete is not None
    assert found.complete.tolist() == [True, False, False, True, False]
    assert found.columns["x"].tolist() == [[1, 1, 0, 1, 2, 1], [4, 0, 1, 1, 2, 4]]
    assert read(frame.assign(f=np.nan)).columns == {}
    assert read(frame[1:3]).columns == {}
    assert read(frame[:0]).columns == {}
    assert read(frame.assign(c=None)).complete.tolist() == [False] * 5  # type: ignore[union-attr]
    with pytest.warns(
        UserWarning,
        match=r"'c' has none of its categories \(x, y\), but other values such as 'X': no row",
    ):
        assert read(frame.assign(c="X")).columns == {}
    # Rows are identified by their numbers in the frame.
    long = frame.assign(v=[[1.0, 2.0]] * 3 + [[1.0]] * 2)
    with pytest.raises(InputError, match="'v' has 1 numbers in row 3 "):
        read(long)


def test_a_row_far_down_is_counted_from_the_first() -> None:
    frame = pd.DataFrame({"a": pd.array(np.zeros(150_000), "Float64"), "label": 0})
    frame.loc[140_001, "a"] = None
    with pytest.raises(InputError, match="first in row 140001 "):
        FrameRows.of(frame, ColumnSpec(), "float32", "data")


def test_two_columns_of_one_name_are_rejected() -> None:
    frame = pd.DataFrame([[1, 2, 0]], columns=["a", "a", "label"])
    with pytest.raises(InputError, match="two columns named 'a'"):
        FrameRows.of(frame, ColumnSpec(), "float32", "data")


def test_text_inputs_do_not_travel_through_spark_as_arrays() -> None:
    frame = pd.DataFrame({"title": ["a", "b"], "label": [0, 1]})
    rows = FrameRows.of(frame, ColumnSpec(["title"]), "float32", "data")
    assert isinstance(rows.columns["x"], Ragged)
    with pytest.raises(InputError, match=r"pass a Spark DataFrame"):
        describe_layout({"train": rows.columns})


def test_pandas_is_not_imported_to_find_out() -> None:
    assert is_frame(table(1))
    assert not is_frame({"a": [1]})
    code = (
        "import sys; from pybackend.core.data.frames import is_frame; "
        "assert not is_frame([1]); assert 'pandas' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_any_slice_of_ragged_rows_can_be_taken() -> None:
    rows: list[Any] = [[1, 2], [], [3], [4, 5, 6], [7]]
    values = np.concatenate([np.array(row, int) for row in rows])
    ragged = Ragged(values, np.cumsum([0, *map(len, rows)]))
    for part in (slice(None), slice(1, 4), slice(1, None, 2), slice(5, None)):
        found = ragged[part]
        edges = found.offsets.tolist()
        assert [found.values[a:b].tolist() for a, b in pairwise(edges)] == rows[part]


LEVELS = pd.Categorical(["mid", "hi", "lo", "mid"], ["lo", "mid", "hi", "top"], ordered=True)
CATEGORIES = pd.DataFrame(
    {
        "level": LEVELS,
        "shop": pd.Categorical([7, 3, 7, 3], [7, 3]),
        "age": pd.cut(pd.Series([1, 5, 9, 4]), [0, 4, 10]),
        "size": [1.0, 2.0, 3.0, 4.0],
        "label": pd.Categorical(["yes", "no", "no", "yes"], ["yes", "no"]),
    }
)


def test_categories_keep_their_order() -> None:
    rows = FrameRows.of(CATEGORIES, ColumnSpec(), "float32", "data")
    assert rows.summary["levels"] == ["yes", "no"]
    assert rows.columns["y"].tolist() == [0, 1, 1, 0]
    assert rows.summary["categories"] == {
        "level": ["lo", "mid", "hi", "top"],
        "shop": [7, 3],
        "age": ["(0, 4]", "(4, 10]"],
    }
    assert rows.feature_names[""] == [
        *("level_lo", "level_mid", "level_hi", "level_top"),
        *("shop_7", "shop_3"),
        *("age_(0, 4]", "age_(4, 10]"),
        "size",
    ]
    np.testing.assert_array_equal(rows.columns["x"][0], [0, 1, 0, 0, 1, 0, 1, 0, 1.0])


def test_categories_of_a_file_are_those_of_the_frame(tmp_path: Path) -> None:
    # Parquet does not store categories of numbers, and nothing of intervals.
    frame = CATEGORIES.drop(columns=["age", "shop"])
    frame.to_parquet(tmp_path / "rows.parquet", row_group_size=1)
    rows = FrameRows.of(frame, ColumnSpec(), "float32", "data")
    files = FileRows.at(tmp_path / "rows.parquet", ColumnSpec(), "float32", "data")
    assert files.summary == rows.summary
    assert files.column_groups == rows.column_groups


def test_categories_by_themselves_are_codes_and_text_by_itself_stays_text() -> None:
    spec = ColumnSpec(features={"a": "shop", "b": ["level"], "c": ["size", "age"]}, label=None)
    rows = FrameRows.of(CATEGORIES, spec, "float32", "data")
    assert rows.columns["x/a"].reshape(-1).tolist() == [0, 1, 0, 1]
    assert isinstance(rows.columns["x/b"], Ragged)
    assert rows.columns["x/c"].shape == (4, 3)


def test_what_is_said_of_categories_holds() -> None:
    spec = ColumnSpec(
        features=["shop", "level", "size"],
        categories={"level": ["hi", "mid", "lo"]},
        encode={"shop": "integer", "level": "integer"},
    )
    rows = FrameRows.of(CATEGORIES, spec, "float32", "data")
    np.testing.assert_array_equal(rows.columns["x"][:, :2], [[0, 1], [1, 0], [0, 2], [1, 1]])
    # Validation data are encoded like the training data, regardless of their own order.
    other = CATEGORIES.assign(level=LEVELS.reorder_categories(["top", "hi", "mid", "lo"]))
    later = FrameRows.of(other, narrow_columns(ColumnSpec(), rows), "float32", "data")
    np.testing.assert_array_equal(later.columns["x"], rows.columns["x"])


def test_too_many_categories_are_an_error() -> None:
    many = pd.DataFrame({"a": pd.Categorical(range(2000)), "b": 1.0, "label": 0})
    with pytest.raises(InputError, match="'a' has more than 1,000 values"):
        FrameRows.of(many, ColumnSpec(), "float32", "data")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            [1.0, 1e300],
            "column 'a' in row 1 .* has the number 1e.300, which is out of range for float32",
        ),
        ([2**70, 1], "column 'a' of `data` contains integers wider than 64 bits"),
        (["a\ud800", "b"], "column 'a' of `data` has text that is not valid Unicode"),
    ],
)
def test_values_that_cannot_be_fed_name_their_column(values: Any, message: str) -> None:
    frame = pd.DataFrame({"a": values, "label": [0, 1]})
    with pytest.raises(InputError, match=message):
        FrameRows.of(frame, ColumnSpec(), "float32", "data")


def _to_views(table: Any) -> Any:
    """Return an Arrow table whose text, bytes and lists are views."""
    kinds = {
        "pixels": pa.list_view(pa.float32()),
        "words": pa.large_list_view(pa.int64()),
        "image": pa.binary_view(),
        **dict.fromkeys(["title", "colour", "animal"], pa.string_view()),
    }
    columns = {
        name: column.combine_chunks()
        for name, column in zip(table.schema.names, table, strict=True)
    }
    for name, kind in kinds.items():
        values = columns[name].to_pylist()
        columns[name] = pa.array(values, kind)
    return pa.table(columns)


def _to_relation(frame: pd.DataFrame) -> Any:
    return duckdb.from_arrow(pa.Table.from_pandas(frame, preserve_index=False))


LIBRARIES = {
    "arrow": lambda frame: pa.Table.from_pandas(frame),
    "batches": lambda frame: pa.Table.from_pandas(frame).to_reader(max_chunksize=7),
    "views": lambda frame: _to_views(pa.Table.from_pandas(frame)),
    "polars": lambda frame: pl.from_arrow(pa.Table.from_pandas(frame)),
    "duckdb": _to_relation,
}


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("name", SPECS)
def test_tables_of_other_libraries_are_as_those_of_pandas(library: str, name: str) -> None:
    frame = table()
    expected = FrameRows.of(frame, SPECS[name], "float32", "data")
    data = LIBRARIES[library](frame)
    assert is_frame(data)
    found = FrameRows.of(data, SPECS[name], "float32", "data")
    assert found.summary == expected.summary
    assert list(found.columns) == list(expected.columns)
    for key, column in expected.columns.items():
        other = found.columns[key]
        if isinstance(column, Ragged):
            assert np.array_equal(column.values, other.values)
            assert np.array_equal(column.offsets, other.offsets)
        else:
            assert column.dtype == other.dtype
            assert np.array_equal(column, other)


def test_files_of_polars_are_as_those_of_pandas(tmp_path: Path) -> None:
    frame = table()
    pl.from_arrow(pa.Table.from_pandas(frame)).write_parquet(tmp_path / "polars.parquet")
    pq.write_table(
        pa.Table.from_pandas(frame).cast(
            pa.schema(
                pa.field(field.name, pa.string_view() if field.type == pa.string() else field.type)
                for field in pa.Table.from_pandas(frame).schema
            )
        ),
        tmp_path / "views.parquet",
    )
    frame.to_parquet(tmp_path / "pandas.parquet", index=False)
    spec = SPECS["text"]
    shown = []
    for name in ("pandas", "polars", "views"):
        files = FileRows.at(tmp_path / f"{name}.parquet", spec, "float32", "data")
        files.spool(tmp_path / name, 1, 0, everything=True)
        rows = StoredRows(tmp_path / name)
        shown.append((files.summary, rows.spec, repr(rows.take(np.arange(ROWS)))))
    assert shown[0] == shown[1] == shown[2]


def test_an_enumeration_keeps_its_order() -> None:
    values = ["lo", "hi", "mid", "lo"]
    kind = pl.Enum(["lo", "mid", "hi"])
    frame = pl.DataFrame({"a": [1.0, 2.0, 3.0, 4.0], "label": pl.Series(values, dtype=kind)})
    found = FrameRows.of(frame, ColumnSpec(), "float32", "data")
    assert found.summary["levels"] == ["lo", "mid", "hi"]
    assert found.columns["y"].tolist() == [0, 2, 1, 0]


def test_incomplete_rows_of_any_table_can_be_left_out() -> None:
    frame = pl.DataFrame({"a": [1.0, None, 3.0], "t": ["x", "y", None]})
    spec = ColumnSpec(label=None, categories={"t": ["x", "y"]}, encode={"t": "one_hot"})
    found = FrameRows.of(frame, spec, "float32", "x", skips_incomplete=True)
    assert found.complete is not None
    assert found.complete.tolist() == [True, False, False]
    assert found.columns["x"].tolist() == [[1, 1, 0]]


def test_a_type_that_arrow_lacks_names_itself() -> None:
    frame = pl.DataFrame({"a": pl.Series([1, 2], dtype=pl.Int128), "label": [0, 1]})
    with pytest.raises(InputError, match="Cast it to a 64-bit type"):
        FrameRows.of(frame, ColumnSpec(), "float32", "data")


def test_series_and_arrays_are_no_tables() -> None:
    for data in (pd.Series([1.0]), pl.Series([1.0]), pa.array([1.0]), np.ones(1), {"a": [1]}, "a"):
        assert not is_frame(data)


LABELS = {
    "series": lambda values: pd.Series(values, index=range(len(values), 0, -1)),
    "array": np.array,
    "list": list,
    "polars": pl.Series,
    "nullable": lambda values: pd.Series(values).convert_dtypes(),
}


@pytest.mark.parametrize("labels", LABELS)
@pytest.mark.parametrize("column", ["animal", "count", "weight"])
def test_labels_beside_a_table_are_its_column(labels: str, column: str) -> None:
    frame = table()[["height", "count", "colour", "animal", "weight"]]
    x = frame.drop(columns=column)
    features = list(x.columns)
    y = LABELS[labels](frame[column].tolist())
    expected = FrameRows.of(frame, ColumnSpec(features, column), "float32", "data")
    found = FrameRows.of((x, y), ColumnSpec(), "float32", "data")
    assert found.summary["features"] == expected.summary["features"] == features
    assert found.summary["levels"] == expected.summary["levels"]
    for key, values in expected.columns.items():
        assert values.dtype == found.columns[key].dtype, key
        assert np.array_equal(values, found.columns[key]), key


def test_labels_and_weights_beside_a_table_validate_by_its_codes() -> None:
    frame = table()
    x = pl.from_pandas(frame[["height", "colour"]])
    y = pd.Series(pd.Categorical(frame["animal"], ["dog", "cat"]))
    train = FrameRows.of((x, y, frame["weight"]), ColumnSpec(), "float32", "data")
    assert train.summary["levels"] == ["dog", "cat"]
    assert train.columns["sample_weight"].tolist() == pytest.approx(frame["weight"].tolist())
    spec = narrow_columns(ColumnSpec(), train)
    validation = FrameRows.of((x[:2], ["cat", "dog"]), spec, "float32", "validation_data")
    assert validation.columns["y"].tolist() == [1, 0]
    assert "sample_weight" not in validation.columns


def test_labels_of_several_numbers_stay_rows() -> None:
    x, y = pd.DataFrame({"a": [1, 2], "b": [0.5, 1.5]}), np.arange(12.0).reshape(2, 3, 2)
    found = FrameRows.of((x, y), ColumnSpec(), "float32", "data")
    assert found.columns["y"].dtype == "float32"
    assert np.array_equal(found.columns["y"].reshape(2, 3, 2), y)


@pytest.mark.parametrize(
    ("x", "parts", "message"),
    [
        ({"a": [1.0, 2.0]}, ([1.0],), r"number of rows \(x: 2, y: 1\)"),
        (
            {"a": [1.0], "label": [1]},
            ([1],),
            "has a column 'label', but y is also passed separately",
        ),
        ({"a": [1.0, 2.0]}, ([1.0, float("nan")],), "`y` of `data` has a NaN in row 1"),
        ({"a": [1.0, 2.0]}, (None, [1, 2]), "sample weights but no labels"),
        ({"a": [1.0, 2.0]}, (["x", None],), "'label'.*null"),
        ({"a": [1.0]}, ([1 + 2j],), "dtype complex128"),
        ({"label": [1.0]}, (pd.DataFrame({"y": [1]}),), "has a column 'label', but y is also"),
        ({"a": [1.0]}, (pd.DataFrame(index=[0]),), "`y` of `data` is a data frame without col"),
        ({"a": [1.0]}, (pd.DataFrame({"p": [1, 2]}),), r"number of rows \(x: 1, y: 2\)"),
    ],
)
def test_labels_that_do_not_fit_their_table_are_refused(
    x: dict[str, Any], parts: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        FrameRows.of((pd.DataFrame(x), *parts), ColumnSpec(), "float32", "data")


FRAME_LABELS = {
    "one column": (lambda y: y[["price"]], ["y"]),
    "columns": (lambda y: y, ["y"]),
    "columns named as the features": (lambda y: y.set_axis(["b", "a"], axis=1), ["y"]),
    "unnamed columns": (lambda y: pd.DataFrame(y.to_numpy()), ["y"]),
    "polars": (pl.from_pandas, ["y"]),
    "outputs": (lambda y: {"left": y["price"], "right": y.to_numpy()}, ["y/left", "y/right"]),
    "list of outputs": (lambda y: [y[["price"]], y["sold"]], ["y/#0", "y/#1"]),
}


@pytest.mark.parametrize("kind", FRAME_LABELS)
def test_labels_in_any_form_keep_the_names_of_the_features(kind: str) -> None:
    make, keys = FRAME_LABELS[kind]
    x = pd.DataFrame({"b": [0.5, 1.5, 2.5], "a": [1.0, 2.0, 4.0]})
    y = make(pd.DataFrame({"price": [1.5, 2.0, 3.0], "sold": [1.0, 0.0, 1.0]}))
    assert holds_frame((x, y))
    found = FrameRows.of((x, y), ColumnSpec(), "float32", "data")
    assert found.summary["feature_names"] == ["b", "a"]
    expected = flatten_data((x.to_numpy(), y.to_numpy() if is_frame(y) else y))
    assert [key for key in found.columns if key != "x"] == keys
    for key in keys:
        values = found.columns[key]
        assert np.array_equal(values, expected[key].reshape(values.shape)), key


def test_weights_may_be_nested_as_the_labels() -> None:
    x, y = pd.DataFrame({"a": [1.0, 2.0]}), {"left": [0, 1], "right": ["yes", "no"]}
    weights = {"left": pd.Series([1.0, 2.0]), "right": np.array([3.0, 4.0])}
    found = FrameRows.of((x, y, weights), ColumnSpec(), "float32", "data")
    assert found.columns["sample_weight/right"].tolist() == [3.0, 4.0]
    assert found.columns["y/right"].tolist() == [1, 0]
    spec = narrow_columns(ColumnSpec(), found)
    y = {"left": [0], "right": ["no"]}
    validation = FrameRows.of((x[:1], y), spec, "float32", "validation_data")
    assert validation.columns["y/right"].tolist() == [0]


def test_columns_of_labels_validate_by_their_names() -> None:
    x, y = pd.DataFrame({"a": [1.0, 2.0]}), pd.DataFrame({"p": [1.0, 2.0], "s": [3.0, 4.0]})
    spec = narrow_columns(ColumnSpec(), FrameRows.of((x, y), ColumnSpec(), "float32", "data"))
    found = FrameRows.of((x, y[["s", "p"]]), spec, "float32", "validation_data")
    assert found.columns["y"].tolist() == [[1.0, 3.0], [2.0, 4.0]]
    with pytest.raises(InputError, match=r"`validation_data` have the columns p, t, but .* p, s"):
        FrameRows.of((x, y.rename(columns={"s": "t"})), spec, "float32", "validation_data")


def test_sparse_columns_and_matrices_are_dense() -> None:
    dense = np.where(RNG.uniform(size=(20, 4)) < 0.8, 0.0, RNG.normal(size=(20, 4)))
    frame = pd.DataFrame(dense, columns=list("abcd")).astype(pd.SparseDtype("float64", 0.0))
    found = FrameRows.of(frame, ColumnSpec(label=None), "float32", "data").columns["x"]
    assert np.array_equal(found, dense.astype("float32"))
    for make in (scipy.sparse.csr_matrix, scipy.sparse.coo_array):
        columns = flatten_data((make(dense), np.arange(20)))
        assert columns["x"].dtype == "float32"
        assert np.array_equal(columns["x"], dense.astype("float32"))
    huge = scipy.sparse.csr_matrix((10**6, 10**6))
    with pytest.raises(InputError, match=r"sparse matrix of shape .* GiB"):
        flatten_data((huge, np.zeros(10**6)))


DAYS = "t = pd.to_datetime(df['when']), (t - t.min()).dt.days; polars"
MONTHS = "df['when'].dt.year * 12 + df['when'].dt.month, or"


@pytest.mark.parametrize(
    ("values", "made"),
    [
        (pd.to_datetime(["2026-01-01", "2026-02-01"]), DAYS),
        (pd.to_datetime(["2026-01-01", "2026-02-01"]).date, DAYS),
        (pd.to_datetime(["2026-01-01", "2026-02-01"]).tz_localize("UTC"), DAYS),
        (pd.to_timedelta([1, 2], "D"), "df['when'].dt.total_seconds(); polars"),
        ([datetime.time(1), datetime.time(2)], "df['when'].map(lambda t: t.hour); polars"),
        (pd.period_range("2026-01", periods=2, freq="M"), MONTHS),
    ],
)
def test_times_say_how_they_become_numbers(values: Any, made: str) -> None:
    frame = pd.DataFrame({"when": values, "a": [1.0, 2.0], "label": [0, 1]})
    with pytest.raises(InputError, match=r"'when'.*convert its times") as caught:
        FrameRows.of(frame, ColumnSpec(), "float32", "data")
    assert made in str(caught.value)


LEFT = pd.DataFrame({"a": [1.0, 2.0], "b": [3.0, 4.0]})
RIGHT = pd.DataFrame({"a": [5.0, 6.0], "kind": ["x", "y"]})


@pytest.mark.parametrize("names", [("left", "right"), None])
def test_frames_of_several_inputs_keep_their_names(names: Any) -> None:
    def make(left: Any, right: Any) -> Any:
        return dict(zip(names, (left, right), strict=True)) if names else [left, right]

    data = make(LEFT, pl.from_pandas(RIGHT)), [0, 1]
    assert holds_frame(data)
    rows = FrameRows.of(data, ColumnSpec(), "float32", "data")
    one, two = (f"x/{name}" for name in names or ("#0", "#1"))
    assert rows.columns[one].tolist() == [[1, 3], [2, 4]]
    assert rows.columns[two].tolist() == [[5, 1, 0], [6, 0, 1]]
    assert rows.columns["y"].tolist() == [0, 1]
    before = names or ("0", "1")
    assert list(rows.feature_names.values()) == [
        [f"{before[0]}.a", f"{before[0]}.b"],
        [f"{before[1]}.a", f"{before[1]}.kind_x", f"{before[1]}.kind_y"],
    ]
    # As in a prediction: other orders and more columns.
    x = make(LEFT[["b", "a"]].assign(c=0), RIGHT[["kind", "a"]][::-1])
    again = FrameRows.of((x,), replace(rows.spec, label=None), "float32", "x").columns
    assert again[one].tolist() == [[1, 3], [2, 4]]
    assert again[two].tolist() == [[6, 0, 1], [5, 1, 0]]
    with pytest.raises(InputError, match=rf"`x` has no column '{before[0]}\.b'.* Its columns are"):
        FrameRows.of((make(LEFT[["a"]], RIGHT),), rows.spec, "float32", "x")
    with pytest.raises(InputError, match=rf"differ in their number of rows \({one}: 2, {two}: 1\)"):
        FrameRows.of((make(LEFT, RIGHT[:1]),), ColumnSpec(), "float32", "x")


def test_frames_fit_the_features_of_one_frame() -> None:
    spec = ColumnSpec(features={"left": ["a"], "image": ["image"]}, label=None)
    images = np.arange(16, dtype="uint8").reshape(2, 2, 2, 2)
    data = {"left": LEFT[["b", "a"]], "image": images}
    assert holds_frame(data)
    rows = FrameRows.of((data,), spec, "float32", "x").columns
    assert rows["x/left"].tolist() == [[1], [2]]
    assert np.array_equal(rows["x/image"], images)
    assert rows["x/image"].dtype == "uint8"
    assert not holds_frame({"left": images, "right": [1, 2]})
    assert not holds_frame(([LEFT, ["a", "b"]], [0, 1]))


def test_intervals_are_no_times() -> None:
    frame = pd.DataFrame({"when": pd.interval_range(0, 2), "label": [0, 1]})
    with pytest.raises(InputError, match=r"take the middle of its intervals, df\['when'\].map\("):
        FrameRows.of(frame, ColumnSpec(), "float32", "data")


def test_names_of_several_levels_are_to_be_joined() -> None:
    names = pd.MultiIndex.from_tuples([("a", "x"), ("label", "y")])
    frame = pd.DataFrame(np.ones((2, 2)), columns=names)
    cure = "e.g. frame.columns = ['_'.join(map(str, name)) for name in frame.columns]"
    message = f"a column named ('a', 'x'): column names must be text, {cure}"
    with pytest.raises(InputError, match=re.escape(message)):
        FrameRows.of(frame, ColumnSpec(), "float32", "data")
    message = f"not ('label', 'y'): join the names of a MultiIndex, {cure}"
    with pytest.raises(InputError, match=re.escape(message)):
        check_column_spec(ColumnSpec(label=("label", "y")))


def test_a_number_that_is_too_large_accuses_its_column_alone() -> None:
    frame = pd.DataFrame({"a": [1.0, 2.0], "b": [1.0, 1e300], "label": [0, 1]})
    with pytest.raises(InputError, match=r"^column 'b' in row 1 .* has the number 1e\+300, which"):
        FrameRows.of(frame, ColumnSpec(), "float32", "data")


@pytest.mark.parametrize(
    ("dtype", "made"),
    [
        ("M8[D]", "(times - times.min()) / np.timedelta64(1, 'D')"),
        ("m8[h]", "times / np.timedelta"),
    ],
)
def test_arrays_of_times_say_how_they_become_numbers(dtype: str, made: str) -> None:
    with pytest.raises(InputError, match="numbers: e.g. days, " + re.escape(made)):
        flatten_data((np.zeros(2, dtype), np.zeros(2)))


def test_a_lazy_frame_is_to_be_collected() -> None:
    frame = pl.DataFrame({"a": [1.0, 2.0], "label": [0, 1]}).lazy()
    with pytest.raises(InputError, match=r"call its collect\(\) first"):
        flatten_data(frame)
    assert not is_frame(frame)


def test_intervals_are_labels_as_they_are_features() -> None:
    frame = pd.DataFrame({"a": np.arange(6.0)})
    cut = pd.cut(frame["a"], 2)
    rows = FrameRows.of((frame, cut), ColumnSpec(), "float32", "data")
    assert rows.columns["y"].tolist() == [0, 0, 0, 1, 1, 1]
    assert rows.summary["levels"] == list(map(str, cut.cat.categories))


class TooLarge:
    """A frame whose library has no memory left to export it."""

    columns = ("x", "label")

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        raise pa.ArrowMemoryError("malloc of size 1 failed")


def test_missing_memory_is_not_an_error_of_the_values() -> None:
    with pytest.raises(MemoryError, match="malloc"):
        FrameRows.of(TooLarge(), ColumnSpec(), "float32", "data")
