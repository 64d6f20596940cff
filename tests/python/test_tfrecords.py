"""Records from Spark and back, by real tasks, some of which fail and are retried."""

from __future__ import annotations

import datetime
import decimal
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from conftest import shared_spark

import pybackend
from pybackend import InputError, read_tfrecords, write_tfrecords
from pybackend.core.launchers.spark import spark_records as records
from pybackend.core.launchers.spark.sessions import driver_python

ALL = (
    "byte tinyint, short smallint, int int, long bigint, flag boolean, float float, "
    "double double, price decimal(10,2), text string, data binary, day date, "
    "time timestamp, local timestamp_ntz, `a.b ``c` int, "
    "ints array<int>, floats array<float>, doubles array<double>, texts array<string>, "
    "blobs array<binary>, days array<date>, flags array<boolean>"
)


@pytest.fixture(scope="module")
def spark() -> Iterator[Any]:
    # Two attempts per task.
    with shared_spark("local[2,2]") as session:
        yield session


def row(number: int) -> tuple[Any, ...]:
    """Return a row of all types; every third value is null."""
    moment = datetime.datetime(2024, 2, 29, 12, 0, 1, number)
    values: list[Any] = [
        number % 100,
        -number,
        number * 1000,
        -(2**62) + number,
        number % 2 == 0,
        number / 8,
        number / 4,
        decimal.Decimal(number) / 4,
        f"é{number}",
        bytes([number % 256] * (number % 5)),
        moment.date(),
        moment,
        moment,
        number,
        list(range(number % 4)),
        [number / 2],
        [],
        ["", f"{number}"],
        [b"\xff"],
        [moment.date()],
        [True, False],
    ]
    return tuple(None if (number + place) % 3 == 0 else v for place, v in enumerate(values))


@pytest.fixture(scope="module")
def frame(spark: Any) -> Any:
    return spark.createDataFrame([row(number) for number in range(200)], ALL).repartition(3)


def left_behind(path: Path) -> list[str]:
    return [name for name in os.listdir(path) if name.startswith(("_temp", "."))]


def rows_as_text(frame: Any) -> list[str]:
    """Return rows as text, for a comparison in any order."""
    return sorted(str(one) for one in frame.collect())


@pytest.mark.full
@pytest.mark.parametrize("compression", [None, "gzip", "zlib"])
def test_every_type_comes_back(spark: Any, frame: Any, tmp_path: Path, compression: Any) -> None:
    path = tmp_path / "data"
    written = write_tfrecords(frame, path, compression=compression)
    assert written.path == str(path)
    assert written.rows == 200
    assert len(written.files) == 3
    assert written.size == sum(os.path.getsize(file) for file in written.files)
    assert left_behind(path) == []
    back = read_tfrecords(spark, path)
    assert back.schema.simpleString() == frame.schema.simpleString()
    assert rows_as_text(back) == rows_as_text(frame)


def test_tensorflow_reads_them(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(50).selectExpr("id", "array(id, id + 1) AS pair", "string(id) AS text")
    written = write_tfrecords(frame, tmp_path / "data", partitions=1)
    spec = {
        "id": tf.io.FixedLenFeature([], tf.int64),
        "pair": tf.io.FixedLenFeature([2], tf.int64),
        "text": tf.io.FixedLenFeature([], tf.string),
    }
    parsed = [
        tf.io.parse_single_example(record, spec)
        for record in tf.data.TFRecordDataset(list(written.files))
    ]
    assert sorted(int(one["id"]) for one in parsed) == list(range(50))
    assert all(one["pair"].numpy().tolist() == [one["id"], one["id"] + 1] for one in parsed)
    assert all(int(one["text"].numpy()) == one["id"] for one in parsed)


def test_files_of_tensorflow_are_read(spark: Any, tmp_path: Path) -> None:
    with tf.io.TFRecordWriter(str(tmp_path / "a.gz"), "GZIP") as writer:
        for number in range(100):
            feature = {
                "y": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
                "x": tf.train.Feature(float_list=tf.train.FloatList(value=[number, 0.5])),
                "name": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"n"])),
            }
            message = tf.train.Example(features=tf.train.Features(feature=feature))
            writer.write(message.SerializeToString())
    inferred = read_tfrecords(spark, tmp_path)
    assert inferred.schema.simpleString() == "struct<name:binary,x:array<float>,y:bigint>"
    chosen = read_tfrecords(
        spark, tmp_path / "a.gz", tfrecord_spec={"y": "int64", "name": "string"}
    )
    rows = sorted(chosen.collect())
    assert rows == [(number, "n") for number in range(100)]


def test_vectors_become_arrays(spark: Any, tmp_path: Path) -> None:
    from pyspark.ml.linalg import Vectors

    rows = [(1, Vectors.dense([1.0, 2.5])), (2, Vectors.sparse(2, {1: 0.5})), (3, None)]
    frame = spark.createDataFrame(rows, ["id", "v.w"]).coalesce(1)
    write_tfrecords(frame, tmp_path / "data")
    back = read_tfrecords(spark, tmp_path / "data")
    assert back.schema.simpleString() == "struct<id:bigint,v.w:array<float>>"
    assert sorted(back.collect()) == [(1, [1.0, 2.5]), (2, [0.0, 0.5]), (3, None)]


def test_no_rows_keep_their_columns(spark: Any, frame: Any, tmp_path: Path) -> None:
    written = write_tfrecords(frame.limit(0), tmp_path / "data")
    assert (written.rows, written.files) == (0, ())
    assert sorted(os.listdir(tmp_path / "data")) == ["_SUCCESS", "_tfdist.json"]
    back = read_tfrecords(spark, tmp_path / "data")
    assert back.schema.simpleString() == frame.schema.simpleString()
    assert back.count() == 0


@pytest.mark.full
def test_a_task_that_is_run_again_writes_its_rows_once(spark: Any, tmp_path: Path) -> None:
    flag = tmp_path / "failed"

    def fail_once(batches: Any) -> Iterator[Any]:
        for number, batch in enumerate(batches):
            if number == 1 and not flag.exists():
                flag.touch()
                raise OSError("the disk had a moment")
            yield batch

    with driver_python(spark):
        rows = spark.range(0, 30_000, 1, 1).mapInArrow(fail_once, "id long")
    written = write_tfrecords(rows, tmp_path / "data")
    assert flag.exists()
    assert written.rows == 30_000
    assert left_behind(tmp_path / "data") == []
    assert read_tfrecords(spark, tmp_path / "data").distinct().count() == 30_000


def test_old_records_go_only_for_new_ones(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "data"
    write_tfrecords(spark.range(5), path)
    with pytest.raises(InputError, match=r"`path`: .* is not empty, .*overwrite=True"):
        write_tfrecords(spark.range(6), path)
    with pytest.raises(InputError, match="null"):
        write_tfrecords(spark.sql("SELECT array(1, null) AS a"), path, overwrite=True)
    assert read_tfrecords(spark, path).count() == 5
    write_tfrecords(spark.range(6), path, overwrite=True)
    assert read_tfrecords(spark, path).count() == 6
    assert left_behind(path) == []


def test_a_null_in_an_array_is_named_by_column_row_and_partition(
    spark: Any, tmp_path: Path
) -> None:
    frame = spark.range(0, 10, 1, 1).selectExpr("id", "array(if(id = 7, null, id)) AS a")
    message = r"column 'a' has a null in the array of row 7 .*\(partition 0\)$"
    with pytest.raises(InputError, match=message):
        write_tfrecords(frame, tmp_path / "data")
    assert os.listdir(tmp_path) == []


def test_a_failing_job_is_a_cluster_error_and_leaves_nothing(spark: Any, tmp_path: Path) -> None:
    frame = spark.range(5).selectExpr("raise_error('no luck') AS x").selectExpr("string(x) AS x")
    with pytest.raises(pybackend.ClusterError, match="no luck"):
        write_tfrecords(frame, tmp_path / "data")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ("struct(id) AS s", "column 's' has the type struct: a TFRecord can store"),
        ("map(id, id) AS m", "column 'm' has the type map"),
        ("array(array(id)) AS a", "column 'a' has the type array<array<long>>"),
        ("null AS n", "column 'n' has the type void"),
        ("id, id", "several columns named 'id'"),
        ("interval '1' day AS i", "column 'i' has the type interval day"),
    ],
)
def test_a_type_that_no_record_holds_is_refused(
    spark: Any, tmp_path: Path, columns: str, message: str
) -> None:
    frame = spark.sql(f"SELECT {columns} FROM range(1)")
    with pytest.raises(InputError, match=message):
        write_tfrecords(frame, tmp_path / "data")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"path": 3}, "`path` must be a path or a URI, not 3"),
        ({"path": ""}, "`path` must be a path"),
        ({"df": [1]}, "`df` must be a Spark DataFrame, not a builtins.list"),
        ({"compression": "snappy"}, "`compression` must be None, 'gzip' or 'zlib', not 'snappy'"),
        ({"overwrite": 1}, "`overwrite` must be True or False, not 1"),
        ({"partitions": 0}, "`partitions` must be a positive whole number or None, not 0"),
        ({"partitions": True}, "`partitions` must be"),
    ],
)
def test_wrong_arguments_are_refused(
    spark: Any, tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    given = {"df": spark.range(1), "path": tmp_path / "data", **arguments}
    with pytest.raises(InputError, match=message):
        write_tfrecords(given.pop("df"), given.pop("path"), **given)


def test_no_columns_are_refused(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="`df` has no columns"):
        write_tfrecords(spark.range(1).select(), tmp_path / "data")


def test_what_cannot_be_read_is_refused_at_once(spark: Any, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"`spark` must be a SparkSession, not a builtins.str"):
        read_tfrecords("local", tmp_path)
    with pytest.raises(InputError, match="`path`: there is no file or folder"):
        read_tfrecords(spark, tmp_path / "nothing")
    with pytest.raises(InputError, match="`tfrecord_spec` must map"):
        read_tfrecords(spark, tmp_path, tfrecord_spec=["x"])  # type: ignore[arg-type]


def test_a_damaged_record_is_named_when_it_is_read(spark: Any, tmp_path: Path) -> None:
    written = write_tfrecords(spark.range(0, 100, 1, 1), tmp_path / "data")
    content = bytearray(Path(written.files[0]).read_bytes())
    content[-20] ^= 1
    Path(written.files[0]).write_bytes(content)
    frame = read_tfrecords(spark, tmp_path / "data")
    with pytest.raises(Exception, match=r"record 99 of .*tfrecord \(at byte \d+\) is damaged"):
        frame.collect()


@pytest.mark.full
def test_files_are_read_by_many_tasks(
    spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "_LEAST_BYTES", 1)
    data = np.random.default_rng(0).bytes(1000).hex()
    frame = spark.range(0, 4000, 1, 1).selectExpr("id", f"'{data}' AS x")
    write_tfrecords(frame, tmp_path / "data")
    back = read_tfrecords(spark, tmp_path / "data")
    assert back.rdd.getNumPartitions() > 2
    assert [one.id for one in back.select("id").collect()] == list(range(4000))


def test_other_file_systems_are_reached_by_fsspec(spark: Any, tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    uri = f"local://{tmp_path / 'data'}"
    written = write_tfrecords(spark.range(20), uri)
    assert all(file.startswith(uri) for file in written.files)
    assert read_tfrecords(spark, uri).count() == 20
    assert left_behind(tmp_path / "data") == []
