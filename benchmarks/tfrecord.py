"""TFRecord files of images: written and read in a process, and written by Spark's tasks.

Each rate is compared with its references, measured in the same rounds: TensorFlow's own way, and
the disk or Spark without any encoding.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rounds import interleaved, seconds

ROWS, WIDTH = 60_000, 784
COPIES = 4
SPARK_ROWS = COPIES * ROWS
# Row by row, TensorFlow would take minutes; its rate does not depend on the number of rows.
SLOW_ROWS = 6_000
_TOGETHER = 10_000
Figures = dict[str, dict[str, float]]
Case = tuple[int, Callable[[], Any]]


def measure(rounds: int) -> dict[str, Figures]:
    """Rows per second, medians over interleaved rounds after one that warms up, by table."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        place = Path(folder)
        batches = _batches()
        return {
            f"write {ROWS} records of {WIDTH} bytes, 1 process": _rates(
                _writing(place, batches), rounds
            ),
            f"read {ROWS} records of {WIDTH} bytes, 1 process": _rates(
                _reading(place, batches), rounds
            ),
            f"write {SPARK_ROWS} records by Spark, 2 tasks": _spark(place, batches, rounds),
        }


def _batches() -> list[Any]:
    import pyarrow as pa

    rng = np.random.default_rng(0)
    found = []
    for _ in range(0, ROWS, _TOGETHER):
        images = rng.integers(0, 256, (_TOGETHER, WIDTH), np.uint8)
        offsets = np.arange(_TOGETHER + 1, dtype=np.int32) * WIDTH
        buffers = [None, pa.py_buffer(offsets), pa.py_buffer(images)]
        column = pa.BinaryArray.from_buffers(pa.binary(), _TOGETHER, buffers)
        labels = pa.array(rng.integers(0, 10, _TOGETHER))
        found.append(pa.record_batch({"image": column, "label": labels}))
    return found


def _writing(folder: Path, batches: list[Any]) -> dict[str, Case]:
    from pybackend.core.data.tfrecord.encode import write_part

    path = folder / "plain"
    write_part(batches, str(path), "plain")
    content = path.read_bytes()
    few = [row for batch in batches for row in batch.to_pylist()][:SLOW_ROWS]
    return {
        "tfdist": (ROWS, lambda: write_part(batches, str(folder / "ours"), "ours")),
        "write() of the same bytes": (ROWS, lambda: (folder / "copy").write_bytes(content)),
        "tf.train.Example, row by row": (SLOW_ROWS, lambda: _by_examples(folder / "tf", few)),
    }


def _by_examples(path: Path, rows: list[dict[str, Any]]) -> None:
    import tensorflow as tf

    feature = tf.train.Feature
    with tf.io.TFRecordWriter(str(path)) as writer:
        for row in rows:
            features = {
                "image": feature(bytes_list=tf.train.BytesList(value=[row["image"]])),
                "label": feature(int64_list=tf.train.Int64List(value=[row["label"]])),
            }
            message = tf.train.Example(features=tf.train.Features(feature=features))
            writer.write(message.SerializeToString())


def _reading(folder: Path, batches: list[Any]) -> dict[str, Case]:
    import tensorflow as tf

    from pybackend.core.data.tfrecord.record_files import RecordFiles

    path = _data_set(folder / "records", batches)

    def ours() -> None:
        files = RecordFiles.at(str(folder / "records"))
        read = sum(len(_arrays(batch)[0]) for batch in files.batches(0, ROWS, ["image", "label"]))
        assert read == ROWS

    def unparsed() -> None:
        for _ in tf.data.TFRecordDataset(path).batch(1024):
            pass

    def parsed(**options: Any) -> None:
        spec = {
            "image": tf.io.FixedLenFeature([], tf.string),
            "label": tf.io.FixedLenFeature([], tf.int64),
        }
        parse = lambda record: tf.io.parse_single_example(record, spec)  # noqa: E731
        for _ in tf.data.TFRecordDataset(path).map(parse, **options).batch(1024):
            pass

    return {
        "tfdist, to numpy": (ROWS, ours),
        "tf.data, not parsed": (ROWS, unparsed),
        "tf.data, parse_single_example": (ROWS, parsed),
    }


def _data_set(folder: Path, batches: list[Any]) -> str:
    """Write a folder as `write_tfrecords` does, with one file, and return the file's path."""
    from pybackend.core.data.tfrecord import folder as data_set
    from pybackend.core.data.tfrecord.encode import write_part
    from pybackend.core.data.tfrecord.folder import RecordsManifest
    from pybackend.core.data.tfrecord.protobuf import to_spark_fields

    data_set.begin(str(folder), "benchmark", False)
    part = write_part(batches, data_set.choose_path(str(folder), "benchmark", "0"), "0")
    assert part is not None
    manifest = RecordsManifest(to_spark_fields(batches[0].schema), None, (part,)).to_json()
    manifest = data_set.finish(str(folder), "benchmark", manifest, False)
    return str(folder / manifest["files"][0]["name"])


def _arrays(batch: Any) -> tuple[Any, Any]:
    """Return images and labels of a batch, without a copy."""
    _, offsets, content = batch.column(0).buffers()
    images = np.frombuffer(content, np.uint8)[: np.frombuffer(offsets, np.int32)[len(batch)]]
    return images.reshape(-1, WIDTH), batch.column(1).to_numpy()


def _spark(folder: Path, batches: list[Any], rounds: int) -> Figures:
    """Measure rows of Parquet files, as in the conversion of a data set."""
    import pybackend

    with _session() as session:
        frame = session.read.parquet(_parquet(folder / "parquet", batches))

        def write() -> None:
            pybackend.write_tfrecords(frame, folder / "spark", overwrite=True)

        # A local function is pickled with its code: tasks cannot import this module.
        def count(batches: Any) -> Iterator[Any]:
            import pyarrow as pa

            yield pa.record_batch({"rows": [sum(batch.num_rows for batch in batches)]})

        def drain() -> None:
            frame.mapInArrow(count, "rows long").collect()

        cases = {
            "tfdist, write_tfrecords": (SPARK_ROWS, write),
            "mapInArrow that counts rows": (SPARK_ROWS, drain),
        }
        return _rates(cases, rounds)


def _parquet(folder: Path, batches: list[Any]) -> str:
    import pyarrow as pa
    import pyarrow.parquet as pq

    folder.mkdir()
    for copy in range(COPIES):
        pq.write_table(pa.Table.from_batches(batches), folder / f"{copy}.parquet")
    return str(folder)


@contextlib.contextmanager
def _session() -> Iterator[Any]:
    from pyspark.sql import SparkSession

    session = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.driver.memory", "2g")
        .config("spark.driver.host", "127.0.0.1")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    session.sparkContext.pythonExec = sys.executable
    try:
        yield session
    finally:
        session.stop()


def _rates(cases: dict[str, Case], rounds: int) -> Figures:
    """Return rows per second of each case, and the speed-up of the first case over it."""
    taken = interleaved({name: seconds(case) for name, (_, case) in cases.items()}, rounds)
    rates = {name: cases[name][0] / np.array(times) for name, times in taken.items()}
    ours = next(iter(rates.values()))
    return {
        name: {
            "thousand rows/s": float(np.median(rate)) / 1000,
            # The median of the rounds' ratios, because other load affects both.
            "tfdist is x": float(np.median(ours / rate)),
        }
        for name, rate in rates.items()
    }


if __name__ == "__main__":
    for title, rows in measure(5).items():
        print(title, *(f"{name:34}{figures}" for name, figures in rows.items()), sep="\n")
