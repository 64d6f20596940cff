"""Records as users of TensorFlowOnSpark read and write them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from conftest import shared_spark

from pybackend import InputError
from pybackend.tfos import dfutil

ROWS = [
    ("text", 1, [2, 3, 4], -1.5, [2.25, -3.0], bytearray(b"\xff\xfe"), True),
    ("né", -7, [5], 0.5, [], bytearray(b""), False),
]
SCHEMA = "a string, b int, c array<int>, d float, e array<double>, f binary, g boolean"


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    with shared_spark("local[2,2]") as session:
        yield session


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    return spark.createDataFrame(ROWS, SCHEMA)


@pytest.mark.full
def test_frames_are_saved_and_loaded(spark: Any, frame: Any, tmp_path: Path) -> None:
    dfutil.saveAsTFRecords(frame.select(*reversed(frame.columns)), str(tmp_path / "records"))
    for source in (spark, spark.sparkContext):
        loaded = dfutil.loadTFRecords(source, str(tmp_path / "records"), binary_features=["f"])
        assert dict(loaded.dtypes) == {
            "a": "string",
            "b": "bigint",
            "c": "array<bigint>",
            "d": "double",
            "e": "array<double>",
            "f": "binary",
            "g": "bigint",
        }
        assert loaded.columns == sorted(loaded.columns)
        assert sorted(map(tuple, loaded.collect()), reverse=True) == sorted(ROWS, reverse=True)
        assert dfutil.isLoadedDF(loaded)
        assert not dfutil.isLoadedDF(loaded.filter("b > 0"))
    assert not dfutil.isLoadedDF(frame)
    with pytest.raises(InputError, match="`sc` must be a SparkContext, not str"):
        dfutil.loadTFRecords("sc", str(tmp_path / "records"))


def test_rows_are_examples_and_back(frame: Any) -> None:
    records = list(dfutil.toTFExample(frame.dtypes)(frame.collect()))
    example = tf.train.Example.FromString(bytes(records[0][0]))
    features = example.features.feature
    assert features["a"].bytes_list.value[:] == [b"text"]
    assert features["c"].int64_list.value[:] == [2, 3, 4]
    assert features["e"].float_list.value[:] == [2.25, -3.0]
    rows = dfutil.fromTFExample(records, ["f"])
    expected = [tuple(row) for row in ROWS]
    expected[1] = (*expected[1][:4], None, *expected[1][5:])  # as the original returns empty lists
    assert [tuple(row) for row in rows] == expected
    kinds = dfutil.infer_schema(example, ["f"])
    assert kinds.simpleString() == (
        "struct<a:string,b:bigint,c:array<bigint>,d:double,e:array<double>,f:binary,g:bigint>"
    )
    assert dfutil.fromTFExample([]) == []
    with pytest.raises(InputError, match="column 'm' has the type map<string,int>"):
        dfutil.toTFExample([("m", "map<string,int>")])
    with pytest.raises(InputError, match=r"not a tf\.train\.Example"):
        dfutil.fromTFExample([(b"\x07\x07", None)])
