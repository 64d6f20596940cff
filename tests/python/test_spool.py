"""A worker's rows on disk: there and back, under any name, read without a copy."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pybackend.data.spool import read_columns, write_columns

arrays = st.sampled_from(
    ["float16", "float32", "float64", "int32", "int64", "uint8", "bool"]
).flatmap(
    lambda dtype: hnp.arrays(
        dtype, hnp.array_shapes(min_dims=1, max_dims=3, min_side=0, max_side=4)
    )
)


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1, max_size=80), arrays, max_size=4))
def test_columns_come_back_in_their_order(columns: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        write_columns(Path(folder) / "train", columns)
        again = read_columns(Path(folder) / "train")
        assert list(again) == list(columns)
        for key, array in columns.items():
            assert again[key].dtype == array.dtype
            np.testing.assert_array_equal(again[key], array)


def test_names_that_differ_only_in_odd_characters_stay_apart(tmp_path: Path) -> None:
    columns = {name: np.array([number]) for number, name in enumerate(["x/a b", "x/a_b", "x/a/b"])}
    write_columns(tmp_path / "train", columns)
    assert {k: v.tolist() for k, v in read_columns(tmp_path / "train").items()} == {
        "x/a b": [0],
        "x/a_b": [1],
        "x/a/b": [2],
    }


def test_no_name_leaves_the_folder(tmp_path: Path) -> None:
    write_columns(tmp_path / "train", {"../../etc/passwd": np.ones(2), "/root": np.ones(2)})
    assert [path.name for path in tmp_path.iterdir()] == ["train"]
    assert len(list((tmp_path / "train").iterdir())) == 3


def test_rows_are_mapped_not_loaded_and_cannot_be_changed(tmp_path: Path) -> None:
    write_columns(tmp_path / "train", {"x": np.ones((10, 3))[::2]})
    x = read_columns(tmp_path / "train")["x"]
    assert isinstance(x, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        x[0] = 2


def test_the_folder_must_be_new(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        write_columns(tmp_path, {"x": np.ones(1)})


def test_objects_are_never_pickled(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="allow_pickle"):
        write_columns(tmp_path / "train", {"x": np.array([object()])})
