"""Records over Spark Connect: all that concerns files happens where the tasks are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_connect import connect_server, new_session

from pybackend import InputError, read_tfrecords, write_tfrecords


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("connect")
    with connect_server(folder) as (url, _), pytest.MonkeyPatch.context() as patch:
        # By this PySpark's functions know which kind of session they serve; it would stay set.
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")
        session = new_session(url)
        yield session
        session.stop()


def test_records_go_there_and_back(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(0, 1000, 1, 2).selectExpr(
        "id", "int(id) AS number", "if(id % 3 = 0, null, array(id, 1)) AS pair"
    )
    written = write_tfrecords(frame, tmp_path / "data", compression="gzip")
    assert (written.rows, len(written.files)) == (1000, 2)
    assert not [name for name in os.listdir(tmp_path / "data") if name.startswith("_temp")]
    back = read_tfrecords(spark, tmp_path / "data")
    assert back.schema.simpleString() == "struct<id:bigint,number:int,pair:array<bigint>>"
    assert sorted(map(str, back.collect())) == sorted(map(str, frame.collect()))


def test_vectors_become_arrays(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors

    frame = spark.createDataFrame([(Vectors.dense([1.0, 2.5]),), (None,)], ["v"])
    write_tfrecords(frame, tmp_path / "data")
    back = read_tfrecords(spark, tmp_path / "data")
    assert sorted(row.v or [] for row in back.collect()) == [[], [1.0, 2.5]]


def test_what_is_wrong_there_is_told_here(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`path`: there is no file or folder"):
        read_tfrecords(spark, tmp_path / "nothing")
    with pytest.raises(InputError, match=r"column 'a' holds a null .* row 0 .*\(partition \d\)$"):
        write_tfrecords(spark.sql("SELECT array(null, 1) AS a"), tmp_path / "data")
    assert not (tmp_path / "data").exists()
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file"):
        write_tfrecords(spark.range(1), tmp_path / "file")
