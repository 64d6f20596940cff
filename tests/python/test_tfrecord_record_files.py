"""Files of records: row ranges, chunks, compression, manifests, and errors of files."""

from __future__ import annotations

import gzip
import hashlib
import json
import pickle
import resource
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import tensorflow as tf
from conftest import full
from records import entry, example, field, write

from pybackend import InputError
from pybackend.core.data.tfrecord import record_files
from pybackend.core.data.tfrecord.encode import write_part
from pybackend.core.data.tfrecord.folder import RecordsManifest
from pybackend.core.data.tfrecord.framing import build_heads
from pybackend.core.data.tfrecord.protobuf import INT64, to_spark_fields
from pybackend.core.data.tfrecord.record_files import RecordFiles

X = pa.schema([("x", pa.int64())])


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use chunks of a kilobyte with as many marks, so that small files have several."""
    monkeypatch.setattr(record_files, "CHUNK_BYTES", 1000)
    monkeypatch.setattr("pybackend.core.data.tfrecord.encode._MARK_BYTES", 1000)
    monkeypatch.setattr("pybackend.core.data.tfrecord.encode._BYTES_TOGETHER", 3000)


def batch_of(first: int, last: int) -> pa.RecordBatch:
    """Return rows whose records have many lengths, some longer than a chunk."""
    x = list(range(first, last))
    notes = ["a" * (number * number % 1500) for number in x]
    return pa.record_batch({"x": x, "note": notes})


def written(folder: Path, compression: Any = None, ends: tuple[int, ...] = (7, 7, 300)) -> str:
    """Write a folder of files with the rows between ``ends``, and a manifest."""
    folder.mkdir()
    parts, first = [], 0
    for number, last in enumerate(ends):
        name = f"part-{number}.tfrecord"
        part = write_part([batch_of(first, last)], str(folder / name), name, compression)
        parts += [part] if part else []
        first = last
    manifest = RecordsManifest(to_spark_fields(batch_of(0, 1).schema), compression, tuple(parts))
    (folder / "_tfdist.json").write_text(json.dumps(manifest.to_json()))
    return str(folder)


@pytest.mark.parametrize("compression", [None, "gzip", "zlib"])
@pytest.mark.parametrize("has_manifest", [full(True), False])
def test_any_range_of_rows_is_read(tmp_path: Path, compression: Any, has_manifest: bool) -> None:
    path = written(tmp_path / "data", compression)
    if not has_manifest:
        (tmp_path / "data" / "_tfdist.json").unlink()
    data = pickle.loads(pickle.dumps(RecordFiles.at(path)))  # noqa: S301
    assert data.counts == (7, 293)
    for first, last in [(0, 300), (0, 0), (5, 9), (6, 7), (7, 8), (250, 251), (299, 300)]:
        expected = list(range(first, last))
        found = pa.Table.from_batches(data.batches(first, last, ["x"]), X)
        assert found.column("x").to_pylist() == expected
    both = pa.Table.from_batches(data.batches(0, 300, ["x", "note"]))
    assert [len(note) for note in both["note"].to_pylist()] == [n * n % 1500 for n in range(300)]


def test_a_compressed_file_is_decompressed_once_for_ranges_in_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = RecordFiles.at(written(tmp_path / "data", "gzip", (300,)))
    opened: list[str] = []
    real = record_files.open_file
    monkeypatch.setattr(record_files, "open_file", lambda uri: opened.append(uri) or real(uri))
    ranges = [(first, first + 10) for first in range(0, 300, 20)]
    found = [pa.Table.from_batches(data.batches(*pair, ["x"]))["x"].to_pylist() for pair in ranges]
    assert found == [list(range(*pair)) for pair in ranges]
    assert len(opened) == 1
    # Two readers at a time take no rows from each other, and one may start again.
    pairs = zip(data.batches(0, 300, ["x"]), data.batches(0, 300, ["x"]), strict=True)
    rows = [batch["x"].to_pylist() for pair in pairs for batch in pair]
    assert sorted(chain.from_iterable(rows)) == sorted([*range(300), *range(300)])


def test_a_range_reads_no_further_than_it_must(tmp_path: Path) -> None:
    data = RecordFiles.at(written(tmp_path / "data", None, (600,)))
    file = Path(data.files[0])
    content = bytearray(file.read_bytes())
    middle = next(place for row, place in data.parts[0].marks if row > 300)
    content[middle] ^= 1  # a length
    file.write_bytes(content)
    assert pa.Table.from_batches(data.batches(0, 200, ["x"])).num_rows == 200
    assert pa.Table.from_batches(data.batches(500, 600, ["x"])).num_rows == 100
    with pytest.raises(InputError, match=r"part-0.tfrecord \(at byte \d+\) is damaged"):
        list(data.batches(0, 600, ["x"]))


def test_ranges_hold_every_row_once(tmp_path: Path) -> None:
    plain = RecordFiles.at(written(tmp_path / "plain", None, (100, 200, 1000)))
    for size in (1, 5000, 50_000, 10**9):
        ranges = plain.ranges(size)
        assert [row for pair in ranges for row in range(*pair)] == list(range(1000))
    assert len(plain.ranges(1)) > 100
    assert len(plain.ranges(10**9)) == 1
    compressed = RecordFiles.at(written(tmp_path / "gzip", "gzip", (100, 200, 1000)))
    assert compressed.ranges(1) == [(0, 100), (100, 200), (200, 1000)]


@pytest.mark.parametrize("compression", ["", "GZIP", "ZLIB"])
def test_files_of_tensorflow_are_read(tmp_path: Path, compression: str) -> None:
    rng = np.random.default_rng(0)
    rows = []
    for name in ("a.tfrecord", "b.tfrecord"):
        with tf.io.TFRecordWriter(str(tmp_path / name), compression or None) as writer:
            for _ in range(50):
                row = {
                    "image": [rng.bytes(30)],
                    "label": [int(rng.integers(-5, 500))],
                    "scores": rng.random(int(rng.integers(0, 4)), "float32").tolist(),
                    "words": [b"a", b""][: int(rng.integers(0, 3))],
                }
                rows.append(row)
                writer.write(message(row).SerializeToString())
    data = RecordFiles.at(str(tmp_path))
    assert data.schema == pa.schema(
        [
            ("image", pa.binary()),
            ("label", pa.int64()),
            ("scores", pa.list_(pa.float32())),
            ("words", pa.list_(pa.binary())),
        ]
    )
    table = pa.Table.from_batches(data.batches(0, data.rows, data.schema.names))
    expected = [{**row, "image": row["image"][0], "label": row["label"][0]} for row in rows]
    assert table.to_pylist() == expected


def message(row: dict[str, list[Any]]) -> Any:
    feature = tf.train.Feature
    lists = {
        "image": lambda v: feature(bytes_list=tf.train.BytesList(value=v)),
        "label": lambda v: feature(int64_list=tf.train.Int64List(value=v)),
        "scores": lambda v: feature(float_list=tf.train.FloatList(value=v)),
        "words": lambda v: feature(bytes_list=tf.train.BytesList(value=v)),
    }
    features = {name: lists[name](values) for name, values in row.items()}
    return tf.train.Example(features=tf.train.Features(feature=features))


@pytest.mark.parametrize(
    ("compression", "theirs"), [(None, ""), ("gzip", "GZIP"), ("zlib", "ZLIB")]
)
def test_tensorflow_reads_what_is_written(tmp_path: Path, compression: Any, theirs: str) -> None:
    path = str(tmp_path / "data")
    write_part([batch_of(0, 40)], path, "data", compression)
    spec = {"x": tf.io.FixedLenFeature([], tf.int64), "note": tf.io.FixedLenFeature([], tf.string)}
    found = [
        (int(row["x"]), len(row["note"].numpy()))
        for row in tf.data.TFRecordDataset(path, theirs).map(
            lambda record: tf.io.parse_single_example(record, spec)
        )
    ]
    assert found == [(n, n * n % 1500) for n in range(40)]


def test_a_spec_says_what_is_read(tmp_path: Path) -> None:
    path = written(tmp_path / "data")
    data = RecordFiles.at(path, {"note": "string[]", "x": "int64", "other": "float32"})
    first = next(data.batches(2, 4, ["other", "x", "note"]))
    assert first.to_pylist()[0] == {"other": None, "x": 2, "note": ["aaaa"]}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ({}, "must map feature names"),
        (["x"], "must map feature names"),
        ({1: "int64"}, "the name 1; expected a string"),
        ({"x": "int32"}, "the type 'int32' for 'x'; expected 'int64', 'float32', 'bytes'"),
        ({"x": int}, "the type <class 'int'> for 'x'"),
    ],
)
def test_a_wrong_spec_is_rejected(tmp_path: Path, spec: Any, expected: str) -> None:
    with pytest.raises(
        InputError, match=f"`tfrecord_spec` {expected}|`tfrecord_spec` has {expected}"
    ):
        RecordFiles.at(str(tmp_path), spec)


def test_an_unknown_column_is_rejected(tmp_path: Path) -> None:
    data = RecordFiles.at(written(tmp_path / "data"))
    with pytest.raises(InputError, match="no feature 'y': they have x, note"):
        list(data.batches(0, 1, ["y"]))


def test_features_of_two_kinds_are_rejected(tmp_path: Path) -> None:
    one = example(entry("x", INT64, field(1, b"\x07")))
    path = write(tmp_path / "a", [one, example(entry("x", 2, b"")), one])
    with pytest.raises(InputError, match=r"record 1 of .*'x' in a different kind .*int64_list"):
        RecordFiles.at(path)


def test_names_that_are_no_text_are_rejected(tmp_path: Path) -> None:
    good, wrong = field(1, b"x"), field(1, b"\xffx")
    path = write(tmp_path / "a", [example(field(1, good)), example(field(1, wrong))])
    with pytest.raises(InputError, match=r"record 1 of .*a \(at byte \d+\) is not a tf.train.Ex"):
        RecordFiles.at(path)


def test_entries_without_a_name_are_read(tmp_path: Path) -> None:
    nameless = field(1, field(2, field(INT64, field(1, b"\x07"))))
    path = write(tmp_path / "a", [example(entry("x", INT64, field(1, b"\x05")), nameless)])
    data = RecordFiles.at(path)
    assert [b.to_pylist() for b in data.batches(0, 1, ["x", ""])] == [[{"x": 5, "": 7}]]


def test_records_without_features_need_a_spec(tmp_path: Path) -> None:
    path = write(tmp_path / "a", [b"", example()])
    with pytest.raises(
        InputError,
        match=r"have no features: specify the features of the records in `tfrecord_spec`",
    ):
        RecordFiles.at(path)
    data = RecordFiles.at(path, {"x": "int64"})
    assert [b.to_pylist() for b in data.batches(0, 2, ["x"])] == [[{"x": None}] * 2]


@pytest.mark.parametrize("cut", [1, 4, 11, 13, 20])
def test_a_truncated_file_is_rejected_by_record_and_byte(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "a"
    part = write_part([batch_of(20, 40)], str(path), "a")
    assert part is not None
    path.write_bytes(path.read_bytes()[:-cut])
    with pytest.raises(InputError, match=r"record 19 of .*a \(at byte \d+\) is incomplete"):
        RecordFiles.at(str(path))


@pytest.mark.parametrize("at", [0, 5, 9, 12, 40, -1])
def test_a_flipped_bit_is_found(tmp_path: Path, at: int) -> None:
    path = tmp_path / "a"
    write_part([batch_of(20, 40)], str(path), "a")
    data = RecordFiles.at(str(path))
    _, place = next(mark for mark in data.parts[0].marks if mark[0] >= 5)
    content = bytearray(path.read_bytes())
    content[place + at if at >= 0 else at] ^= 4
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"record \d+ of .*a \(at byte \d+\) is damaged"):
        list(data.batches(0, 20, ["x"]))


def test_what_is_not_a_file_of_records_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x,y\n1,2\n3,4\n")
    with pytest.raises(InputError, match=r"a.csv is not a TFRecord file: it begins with 78 2c"):
        RecordFiles.at(str(tmp_path))


@pytest.mark.parametrize("compression", ["gzip", "zlib"])
def test_a_truncated_or_damaged_stream_is_rejected(tmp_path: Path, compression: Any) -> None:
    path = tmp_path / "a"
    write_part([batch_of(0, 400)], str(path), "a", compression)
    content = path.read_bytes()
    path.write_bytes(content[:-9])
    with pytest.raises(InputError, match="a cannot be read: its compressed stream ends too early"):
        RecordFiles.at(str(path))
    path.write_bytes(content[:1000] + bytes(50) + content[1050:])
    with pytest.raises(InputError, match=r"its compressed stream is damaged|is damaged"):
        RecordFiles.at(str(path))


def test_compressed_streams_may_be_joined(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_part([batch_of(0, 9)], str(path), "a")
    plain = path.read_bytes()
    path.write_bytes(gzip.compress(plain) + gzip.compress(b"") + gzip.compress(plain))
    assert RecordFiles.at(str(path)).counts == (18,)


def test_a_manifest_must_fit_the_files(tmp_path: Path) -> None:
    path = Path(written(tmp_path / "data"))
    (path / "more.tfrecord").write_bytes(b"")
    with pytest.raises(InputError, match=r"more.tfrecord is not listed in"):
        RecordFiles.at(str(path))
    (path / "more.tfrecord").unlink()
    content = (path / "part-2.tfrecord").read_bytes()
    (path / "part-2.tfrecord").write_bytes(content[:-1])
    size = len(content)
    with pytest.raises(InputError, match=f"part-2.tfrecord has {size - 1} bytes.* {size}"):
        RecordFiles.at(str(path))
    (path / "part-2.tfrecord").unlink()
    with pytest.raises(InputError, match=r"part-2.tfrecord is missing"):
        RecordFiles.at(str(path))


@pytest.mark.parametrize("content", ["{", "[]", '{"version": 2}', '{"version": 1}'])
def test_a_manifest_that_cannot_be_read_is_rejected(tmp_path: Path, content: str) -> None:
    path = Path(written(tmp_path / "data"))
    (path / "_tfdist.json").write_text(content)
    with pytest.raises(InputError, match=r"_tfdist.json cannot be read .*: remove it"):
        RecordFiles.at(str(path))


def alter(path: Path, **values: Any) -> None:
    """Change a manifest without computing its digest again."""
    file = path / "_tfdist.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **values}))


def test_a_manifest_that_was_altered_is_rejected(tmp_path: Path) -> None:
    path = Path(written(tmp_path / "data"))
    alter(path, files=json.loads((path / "_tfdist.json").read_text())["files"][:1])
    said = "it was altered: its digest is missing or wrong"
    with pytest.raises(InputError, match=said):
        RecordFiles.at(str(path))
    file = Path(written(tmp_path / "other")) / "_tfdist.json"
    values = json.loads(file.read_text())
    del values["sha256"]
    file.write_text(json.dumps(values))
    with pytest.raises(InputError, match=said):
        RecordFiles.at(str(file.parent))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"rows": 5}, "it lists 5 rows, but its files have 300"),
        ({"compression": "zip"}, "`compression` must be None"),
        ({"schema": {"fields": [{"name": "x", "type": {"type": "array"}}]}}, "elementType"),
        ({"schema": {"fields": [{"name": "x", "type": "decimal(999,0)"}]}}, "precision"),
        ({"schema": 5}, "TypeError"),
        ({"files": {}}, "it lists 300 rows, but its files have 0"),
        ({"files": [5]}, "RecordFile is 5, not an object"),
        ({"files": [{"name": "a"}]}, "RecordFile without checksum, rows, size"),
        (
            {"files": [{"name": "a", "rows": 1.5, "size": 1, "checksum": 0}]},
            "RecordFile.rows is 1.5",
        ),
        ({"files": [{"name": "../a", "rows": 1, "size": 1, "checksum": 0}]}, "outside of its"),
        (
            {"files": [{"name": "a", "rows": 3, "size": 9, "checksum": 0, "marks": [[1, 0]]}]},
            "the rows, size and marks of 'a' contradict each other",
        ),
    ],
)
def test_a_manifest_that_contradicts_itself_is_rejected(
    tmp_path: Path, change: dict[str, Any], expected: str
) -> None:
    path = Path(written(tmp_path / "data"))
    file = path / "_tfdist.json"
    values = {**json.loads(file.read_text()), **change}
    del values["sha256"]
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({**values, "sha256": digest}))
    with pytest.raises(InputError, match=rf"_tfdist.json cannot be read \(.*{expected}"):
        RecordFiles.at(str(path))


@pytest.mark.parametrize("compression", [None, "gzip"])
@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (2**31 - 1, "is incomplete"),
        (2**31, "more than the limit of 2 GB"),
        (2**62, "more than the limit of 2 GB"),
    ],
)
def test_a_length_beyond_the_file_asks_for_no_memory(
    tmp_path: Path, compression: Any, length: int, expected: str
) -> None:
    head = build_heads(np.array([length]))[0]
    path = tmp_path / "a"
    path.write_bytes(gzip.compress(head + b"abc") if compression else head + b"abc")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InputError, match=rf"record 0 of .*a \(at byte 0\) .*{expected}"):
        RecordFiles.at(str(path))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # KB


def test_what_is_being_written_is_not_read(tmp_path: Path) -> None:
    path = Path(written(tmp_path / "data"))
    (path / "_tfdist.json").unlink()
    (path / "_temporary-abc").mkdir()
    with pytest.raises(InputError, match="is being written, or was left behind"):
        RecordFiles.at(str(path))


def test_a_file_that_shrank_meanwhile_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "a"
    write_part([batch_of(0, 20)], str(path), "a")
    data = RecordFiles.at(str(path))
    write_part([batch_of(0, 3)], str(path), "a")
    with pytest.raises(InputError, match=r"a no longer has the 20 records"):
        list(data.batches(0, 20, ["x"]))
    path.unlink()
    with pytest.raises(InputError, match=r"a cannot be read on .*No such file.* a URI"):
        list(data.batches(0, 20, ["x"]))


def test_another_file_of_the_same_size_is_rejected(tmp_path: Path) -> None:
    data = RecordFiles.at(written(tmp_path / "data"))
    other = pa.record_batch({"x": range(1, 8), "note": batch_of(0, 7).column("note")})
    write_part([other], data.files[0], "a")
    assert RecordFiles.at(str(tmp_path / "data")) == data
    with pytest.raises(InputError, match=r"part-0.tfrecord no longer has the 7 records"):
        list(data.batches(0, 9, ["x"]))


def test_other_file_systems_are_reached_by_fsspec(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    path = f"local://{written(tmp_path / 'data')}"
    data = RecordFiles.at(path)
    assert all(file.startswith("local://") for file in data.files)
    assert pa.Table.from_batches(data.batches(5, 300, ["x"])).num_rows == 295


def test_a_part_tells_of_its_file(tmp_path: Path) -> None:
    part = write_part([batch_of(0, 0), batch_of(0, 90)], str(tmp_path / "a"), "a")
    assert part is not None
    assert (part.name, part.rows) == ("a", 90)
    assert part.size == (tmp_path / "a").stat().st_size
    assert part.marks[0] == (0, 0)
    assert write_part([batch_of(0, 0)], str(tmp_path / "b"), "b") is None
    assert not (tmp_path / "b").exists()
