"""Input that is damaged or hostile: no crash, no hang, little memory, and no errors but ours.

TFDIST_FUZZ_INPUTS says how many inputs each test draws; `make fuzz` draws 100,000.
"""

from __future__ import annotations

import base64
import gzip
import json
import os
import resource
import socket
import struct
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pytest
from damage import altered, damaged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from records import entry, example, field, frame

from pybackend.data.text import decode_lines, encode_lines
from pybackend.data.tfrecord.files import RecordFiles
from pybackend.data.tfrecord.framing import build_heads
from pybackend.data.tfrecord.manifest import Manifest
from pybackend.data.tfrecord.part import write_part
from pybackend.data.tfrecord.types import BYTES, FLOAT, INT64, to_spark_fields
from pybackend.errors import ClusterError, Failure, InputError, SerializationError
from pybackend.job.codec import decode, encode
from pybackend.job.job import Job
from pybackend.job.messages import Arrival, EpochEnded, Event, Failed, Order
from pybackend.job.options import Exchange
from pybackend.job.report import WorkerReport
from pybackend.job.values import decode_value, encode_value
from pybackend.net.greeting import greet_as_client, greet_as_server
from pybackend.net.stream import Stream
from pybackend.tf_config import make_tf_config, names_cluster, read_tf_config

INPUTS = int(os.environ.get("TFDIST_FUZZ_INPUTS", "40"))
MOST_KILOBYTES = 1 << 20

fuzz = settings(
    max_examples=INPUTS,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: Any) -> Path:
    return Path(tmp_path_factory.mktemp("fuzz"))


@pytest.fixture(autouse=True)
def little_memory() -> Iterator[None]:
    """No input takes a gigabyte."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KILOBYTES


# --- connections ---


@pytest.fixture(scope="module")
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@contextmanager
def connected(server: socket.socket, sent: bytes) -> Iterator[Stream]:
    """A connection on which this has come, and nothing will come any more."""
    with socket.create_connection(server.getsockname()) as theirs:
        # Closed without a wait, or the system runs out of ports.
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with closing(Stream.accept(server)) as stream:
            yield stream


@fuzz
@given(st.binary(max_size=150))
def test_no_greeting_is_accepted_by_chance(server: Any, sent: bytes) -> None:
    with connected(server, sent) as stream, pytest.raises(OSError):
        greet_as_server(stream, "token", "test")
    with connected(server, sent) as stream, pytest.raises(OSError):
        greet_as_client(stream, "token", 0, "test")


@fuzz
@given(st.lists(st.binary(max_size=80), max_size=5))
def test_lines_are_read_whole_and_below_their_limit(server: Any, parts: list[bytes]) -> None:
    sent = b"\n".join(parts)
    with connected(server, sent) as stream:
        for line in sent.split(b"\n")[:-1]:
            if len(line) >= 64:
                with pytest.raises(ValueError, match="more than 64 bytes"):
                    stream.read_line(64)
                return
            assert stream.read_line(64) == line + b"\n"
        with suppress(ValueError):
            assert stream.read_line(64) == b""


# --- text ---


@fuzz
@given(
    altered(
        make_tf_config(["a:1", "[fd00::1]:2"], 1, chief="c:3"),
        make_tf_config({0: "a:1", 7: "b:2"}, 7, ps=["p:1"]),
    )
)
def test_tf_config(text: str) -> None:
    names_cluster(text)
    with suppress(ClusterError):
        read_tf_config(text)


FAILURE = Failure(1, "a", "ValueError", "what", log=("line",), time=1.5)
JOB = Job(
    kind="train", workers=2, class_weight=((0, 1.0), (1, 2.5)), exchange=Exchange(bucket_mb=2.0)
)
REPORT = WorkerReport(0, "a", 17, value={"loss": [1.0]}, failure=FAILURE)
MESSAGES = [
    EpochEnded(1, 2, 0.5, {"loss": 1.0}),
    Failed(FAILURE),
    Order("token", ("a:1", "b:2"), counts={"train": [1, 2]}),
    Arrival("a:1", "a", {"tensorflow": "2"}, {"train": {"rows": 1}}, seed=3),
]


@fuzz
@given(altered(encode(JOB), encode(REPORT), *map(encode, MESSAGES)))
def test_jobs_reports_and_messages(text: str) -> None:
    with suppress(ValueError):
        decode(text, Job, WorkerReport, Order, Arrival, *get_args(Event))


@fuzz
@given(altered(encode_value({"a": (1, [2.5, None]), "b": b"bytes", "c": np.arange(6.0)})))
def test_values_of_functions(text: str) -> None:
    with suppress(SerializationError):
        decode_value(text)


# --- records ---

RECORD = example(
    entry("x", INT64, field(1, b"\x07\xff\x01")),
    entry("f", FLOAT, field(1, b"abcdefgh")),
    entry("s", BYTES, field(1, b"text") + field(1, b"\xff")),
)
SPECS = [None, {"x": "int64"}, {"x": "int64[]", "f": "float32[]", "s": "string[]"}, {"s": "bytes"}]


def read_all(path: Path, spec: Any = None) -> None:
    """Read a file or folder of records to its end."""
    data = RecordFiles.at(str(path), spec)
    for batch in data.batches(0, data.rows, data.schema.names):
        batch.validate(full=True)


@fuzz
@given(st.lists(damaged(RECORD, example()), max_size=4), st.sampled_from(SPECS), st.booleans())
def test_records_whose_checksums_are_right(
    folder: Path, contents: list[bytes], spec: Any, is_compressed: bool
) -> None:
    path = folder / "a"
    data = b"".join(map(frame, contents))
    path.write_bytes(gzip.compress(data, 1) if is_compressed else data)
    with suppress(InputError):
        read_all(path, spec)


@fuzz
@given(st.data())
def test_damaged_files_of_records(folder: Path, data: Any) -> None:
    whole = frame(RECORD) * 3 + frame(b"")
    lengths = [build_heads(np.array([size]))[0] for size in (0, 5, 2**20, 2**31 - 1, 2**62)]
    contents = [whole, gzip.compress(whole), zlib.compress(whole), *lengths]
    (folder / "a").write_bytes(data.draw(damaged(*contents)))
    with suppress(InputError):
        read_all(folder / "a")


@pytest.fixture(scope="module")
def records(tmp_path_factory: Any) -> Path:
    """A folder of records with their manifest."""
    path: Path = tmp_path_factory.mktemp("records")
    batch = pa.record_batch({"x": range(9), "s": [["a", None][:1]] * 9})
    parts = [write_part([batch], str(path / name), name) for name in ("a.tfrecord", "b.tfrecord")]
    manifest = Manifest(to_spark_fields(batch.schema), None, tuple(filter(None, parts)))
    (path / "good.json").write_text(json.dumps(manifest.to_json()))
    return path


@fuzz
@given(st.data(), st.booleans())
def test_manifests(records: Path, data: Any, has_digest: bool) -> None:
    text = (records / "good.json").read_text()
    if not has_digest:
        text = json.dumps({n: value for n, value in json.loads(text).items() if n != "sha256"})
    altered_text = data.draw(altered(text))
    (records / "_tfdist.json").write_text(altered_text, errors="surrogatepass")
    with suppress(InputError):
        read_all(records)
        if has_digest and "sha256" in json.loads(altered_text):
            assert json.loads(altered_text) == json.loads(text)


# --- rows through R ---


def stream_of(columns: dict[str, Any]) -> bytes:
    """An Arrow stream as a line holds it."""
    lines = [batch.column(0).to_pylist() for batch in encode_lines([pa.record_batch(columns)])]
    return base64.b64decode(lines[1][0][8:])


NESTED = {"a": [[1.5], None], "b": ["x", None], "c": [[["y"]], []], "d": [b"z", b""]}
STREAMS = [stream_of({"a": [1, 2]}), stream_of(NESTED)]


@fuzz
@given(damaged(*STREAMS))
def test_lines_whose_checksum_is_right(folder: Path, content: bytes) -> None:
    line = f"{zlib.crc32(content):08x}{base64.b64encode(content).decode()}"
    (folder / "lines").write_text(line)
    with suppress(ClusterError):
        for batch in decode_lines(folder / "lines"):
            batch.to_pylist()
