"""Damaged or hostile input: no crash, no hang, little memory, and only tfdist's errors.

TFDIST_FUZZ_INPUTS says how many inputs each test draws; `make fuzz` draws 100,000.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import resource
import socket
import ssl
import struct
import threading
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from fractions import Fraction
from pathlib import Path
from typing import Any, get_args

import ml_dtypes
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from damage import altered, damaged
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from records import entry, example, field, frame
from relay import relaying
from test_checkpoint_store import manifest
from test_value_codec import Color
from threads import Threads

from pybackend.core.collective import Mesh
from pybackend.core.collective.links import Link
from pybackend.core.data.arrays import Ragged
from pybackend.core.data.checkpoint_store import CheckpointStore
from pybackend.core.data.row_store import write_columns
from pybackend.core.data.rows import StoredRows
from pybackend.core.data.spark_rows import decode_lines, encode_lines
from pybackend.core.data.tfrecord.encode import write_part
from pybackend.core.data.tfrecord.folder import RecordsManifest
from pybackend.core.data.tfrecord.framing import build_heads
from pybackend.core.data.tfrecord.protobuf import BYTES, FLOAT, INT64, to_spark_fields
from pybackend.core.data.tfrecord.record_files import RecordFiles
from pybackend.core.errors import (
    ClusterError,
    Failure,
    InputError,
    PeerLostError,
    SerializationError,
    WorkerFailedError,
)
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Arrival, EpochEnded, Event, Failed, Order
from pybackend.core.job.report import WorkerReport, read_metrics, read_report
from pybackend.core.job.value_codec import decode_state, decode_value, encode_state, encode_value
from pybackend.core.job.worker_options import Exchange
from pybackend.core.launchers.remote.bundle import read_greeting
from pybackend.core.launchers.script.ranks import HostRanks, ScriptCommand, ScriptTask
from pybackend.core.machine.capacity import read_machine
from pybackend.core.net.authentication import _prove, greet_as_client, greet_as_server
from pybackend.core.net.meeting import (
    Everyone,
    Finished,
    Join,
    MeetElsewhere,
    MeetingServer,
    Refused,
    ResultPart,
)
from pybackend.core.net.meeting_client import MeetingClient
from pybackend.core.net.stream import Stream
from pybackend.core.tf_config import make_tf_config, names_cluster, read_tf_config
from pybackend.tfos.feed.items import decode_items, encode_items, read_batch, write_batch

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
    """Limit the memory: no input needs a gigabyte."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < MOST_KILOBYTES


# --- connections ---


@pytest.fixture(scope="module")
def server() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


@pytest.fixture(scope="module")
def threads() -> Iterator[Threads]:
    with Threads() as pool:
        yield pool


@contextmanager
def connected(server: socket.socket, sent: bytes) -> Iterator[Stream]:
    """Return a connection that has received these bytes, and will receive no more."""
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


HELLO = ssl.MemoryBIO()
with suppress(ssl.SSLWantReadError):
    ssl.create_default_context().wrap_bio(
        ssl.MemoryBIO(), HELLO, server_hostname="a"
    ).do_handshake()


@fuzz
@given(damaged(HELLO.read()))
def test_no_handshake_is_accepted_by_chance(server: Any, threads: Any, sent: bytes) -> None:
    with closing(Stream.connect(server.getsockname(), 30)) as theirs:
        stream = Stream.accept(server)
        accepted = threads.submit(greet_as_server, stream, "token", "test", True)
        nonce = theirs.read_exactly(33, 30)
        ours = bytes(36) + b"\x01"
        theirs.send_all(ours + _prove("token", b"client", "test", nonce, ours) + sent, 30)
        theirs.close()
        with closing(stream), pytest.raises(OSError):
            accepted.result(30)


# --- collectives ---

CALLS: dict[str, Callable[[Mesh], Any]] = {
    "all_reduce": lambda mesh: mesh.all_reduce(np.ones(5, "float32")),
    "all_gather": lambda mesh: mesh.all_gather(np.ones((3 + mesh.rank, 2), "float32")),
    "gather": lambda mesh: mesh.gather(np.ones(3 + mesh.rank)),
    "broadcast": lambda mesh: mesh.broadcast(np.ones(5, "int64"), 1),
}
ALGORITHMS: list[Any] = ["ring", "doubling"]


def make_mesh(stream: Stream, rank: int, algorithm: Any) -> Mesh:
    return Mesh({1 - rank: Link(stream, 1 - rank, "h", 30.0)}, rank, 2, algorithm)


@pytest.fixture(scope="module")
def frames(server: socket.socket, threads: Any) -> dict[tuple[str, Any], bytes]:
    """Messages of rank 1 in each call."""
    found: dict[tuple[str, Any], bytes] = {}
    for name, call in CALLS.items():
        for algorithm in ALGORITHMS:
            sent: list[bytes] = []
            with relaying(server.getsockname()) as relay:
                relay.to_server = lambda piece, sent=sent: sent.append(piece) or piece
                theirs = Stream.connect(relay.place, 30)
                with closing(Stream.accept(server)) as ours, closing(theirs):
                    meshes = make_mesh(ours, 0, algorithm), make_mesh(theirs, 1, algorithm)
                    list(threads.map(call, meshes))
            found[name, algorithm] = b"".join(sent)
    return found


@fuzz
@given(st.sampled_from(sorted(CALLS)), st.sampled_from(ALGORITHMS), st.data())
def test_frames(server: Any, frames: Any, name: str, algorithm: Any, data: Any) -> None:
    sent = data.draw(damaged(frames[name, algorithm]))
    with connected(server, sent) as stream, suppress(PeerLostError, ClusterError):
        CALLS[name](make_mesh(stream, 0, algorithm))


# --- meetings ---

JOIN = Join(encode(Arrival("a:1", "a", {"tensorflow": "2"}, {}, seed=3)))
SAID = [JOIN, ResultPart("report", "YWJj"), EpochEnded(1, 2, 0.5, {"loss": 1.0})]
ANSWERS = [
    Everyone(("a", "b")),
    MeetElsewhere(),
    Refused("no"),
    ResultPart("m", "YWJj"),
    Finished(),
]


@fuzz
@given(st.lists(altered(*map(encode, SAID)), max_size=3))
def test_what_members_say_at_a_meeting(server: Any, said: list[str]) -> None:
    lines = "".join(f"{text}\n" for text in said).encode()
    with connected(server, lines) as stream, MeetingServer(None, "token", 2) as meeting:
        meeting.adopt(stream, 0)
        meeting.drain(30)
        assert meeting.has_left(0)


@fuzz
@given(st.lists(altered(*map(encode, ANSWERS)), max_size=3))
def test_what_a_meeting_answers(server: Any, said: list[str]) -> None:
    lines, has_ended = "".join(f"{text}\n" for text in said).encode(), threading.Event()
    with (
        connected(server, lines) as stream,
        MeetingClient(None, "token", 0, 1.0, has_ended.set, stream=stream),
    ):
        assert has_ended.wait(30)


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
JOB = TrainingJob(workers=2, class_weight=((0, 1.0), (1, 2.5)), exchange=Exchange(bucket_mb=2.0))
REPORT = WorkerReport(0, "a", 17, value={"loss": [1.0]}, failure=FAILURE)
MESSAGES = [
    EpochEnded(1, 2, 0.5, {"loss": 1.0}),
    Failed(FAILURE),
    Order("token", ("a:1", "b:2"), counts={"train": [1, 2]}),
    Arrival("a:1", "a", {"tensorflow": "2"}, {"train": {"rows": 1}}, seed=3),
]


SCRIPT = ScriptTask(
    ScriptCommand("python", "a.py"), "/", HostRanks("a", (0,), (0,), 1), True, {"A": "b"}
)
HOST = {"version": [3, 11, 2], "python": "python", "missing": [], "machine": read_machine()}


@fuzz
@given(altered(*map(encode, [JOB, REPORT, SCRIPT, *MESSAGES])))
def test_jobs_reports_and_messages(text: str) -> None:
    with suppress(ValueError):
        decode(text, TrainingJob, WorkerReport, ScriptTask, Order, Arrival, *get_args(Event))
    report = read_report(text, 0, "a")
    if report.ok:
        with suppress(ClusterError):
            read_metrics(report, list)
    else:
        str(WorkerFailedError([report.failure]))


@fuzz
@given(altered(json.dumps(HOST)))
def test_greetings_of_hosts(text: str) -> None:
    with suppress(ClusterError):
        read_greeting(f"tfdist {text}\n".encode(), "a")


VALUES = [
    {"a": (1, [2.5, None]), "b": b"bytes", "c": np.arange(6.0), "d": {4}},
    [pd.DataFrame({"a": [1, 2], "b": pd.array([1, None])}), pd.Timestamp("2026-01-01", tz="UTC")],
    [FAILURE, Color.RED, deque([1]), Fraction(1, 3), Counter("ab"), timedelta(1), Path("a")],
]
STATE = {
    "variables": [np.arange(6.0).reshape(2, 3), np.ones(3, ml_dtypes.bfloat16)],
    "ranks": [{"random": (3, np.arange(4, dtype=np.uint64), None), 1: {"a", b"b"}}],
}
HEAD = struct.Struct("<8sQ")
PLACE = HEAD.size + HEAD.unpack_from(encode_state(STATE))[1]
HEADER = encode_state(STATE)[HEAD.size : PLACE].decode()


def with_header(text: str) -> bytes:
    """Return the state with another header."""
    header = text.encode(errors="surrogatepass")
    return HEAD.pack(b"tfdist-2", len(header)) + header + encode_state(STATE)[PLACE:]


ROWS = [
    [(1, "a", [1.5]), (2, None, [])],
    [{"a": np.arange(3), "b": Fraction(1, 2)}, {"a": np.arange(2), "b": Fraction(1)}],
    [Color.RED, b"x", None, 2**70],
]


def kind_of(rows: list[Any]) -> Any:
    return json.loads(encode_items(rows).schema.metadata[b"tfdist.kind"])


@fuzz
@given(
    altered(*map(encode_value, VALUES)),
    damaged(encode_state(STATE), encode_state({}), encode_state(np.float32(2)))
    | altered(HEADER).map(with_header),
    damaged(*(write_batch(encode_items(rows)).to_pybytes() for rows in ROWS)),
    altered(*(json.dumps(kind_of(rows)) for rows in ROWS)),
    st.sampled_from(ROWS),
)
def test_values_of_functions_states_and_rows(
    text: str, content: bytes, rows: bytes, kind: str, items: list[Any]
) -> None:
    with suppress(SerializationError):
        decode_value(text)
    with suppress(SerializationError):
        decode_state(content)
    with suppress(SerializationError):
        decode_items(read_batch(rows))
    metadata = {b"tfdist.kind": kind.encode(errors="surrogatepass")}
    with suppress(SerializationError):
        decode_items(encode_items(items).replace_schema_metadata(metadata))


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
    manifest = RecordsManifest(to_spark_fields(batch.schema), None, tuple(filter(None, parts)))
    (path / "good.json").write_text(json.dumps(manifest.to_json()))
    return path


def sign(text: str) -> str:
    """Return a manifest with the digest of its values."""
    try:
        values = json.loads(text)
        if not isinstance(values, dict):
            return text
        values.pop("sha256", None)
        digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
        return json.dumps({**values, "sha256": digest})
    except (ValueError, RecursionError):
        return text


@fuzz
@given(st.data(), st.booleans())
def test_manifests(records: Path, data: Any, is_signed_again: bool) -> None:
    text = (records / "good.json").read_text()
    altered_text = data.draw(altered(text))
    if is_signed_again:
        altered_text = sign(altered_text)
    (records / "_tfdist.json").write_text(altered_text, errors="surrogatepass")
    with suppress(InputError):
        read_all(records)
        if not is_signed_again:
            assert json.loads(altered_text) == json.loads(text)


# --- checkpoints ---


@pytest.fixture(scope="module")
def kept(tmp_path_factory: Any) -> Path:
    """A folder with one checkpoint."""
    path: Path = tmp_path_factory.mktemp("kept")
    store = CheckpointStore(str(path))
    store.commit(manifest(3, store.write_model(b"model", "h5")), encode_state(STATE))
    (path / "good").write_text(next(path.glob("*.json")).read_text().partition("\n")[2])
    return path


@fuzz
@given(st.data())
def test_manifests_of_checkpoints_whose_digest_is_right(kept: Path, data: Any) -> None:
    text = data.draw(altered((kept / "good").read_text()))
    content = text.encode(errors="surrogatepass")
    (path,) = kept.glob("*.json")
    path.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    with suppress(InputError, ClusterError):
        CheckpointStore(str(kept)).find_newest()


# --- rows of workers ---


@pytest.fixture(scope="module")
def spool(tmp_path_factory: Any) -> dict[str, bytes]:
    """Write the files of some rows; return them by name."""
    path: Path = tmp_path_factory.mktemp("spool") / "train"
    columns = {
        "x": np.arange(12.0).reshape(6, 2),
        "n": Ragged(np.arange(9), np.array([0, 2, 2, 5, 6, 9, 9])),
        "s": Ragged(np.frombuffer(b"abcdef", np.uint8), np.arange(7), is_text=True),
    }
    write_columns(path, columns)
    return {file.name: file.read_bytes() for file in path.iterdir()}


@fuzz
@given(st.data(), st.booleans())
def test_files_of_rows(folder: Path, spool: dict[str, bytes], data: Any, in_memory: bool) -> None:
    (folder / "rows").mkdir(exist_ok=True)
    damaged_one = data.draw(st.sampled_from(sorted(spool)))
    for name, content in spool.items():
        is_damaged = name == damaged_one
        (folder / "rows" / name).write_bytes(data.draw(damaged(content)) if is_damaged else content)
    with suppress(ClusterError):
        rows = StoredRows(folder / "rows", in_memory)
        rows.take(np.arange(len(rows)))


# --- rows through R ---


def stream_of(columns: dict[str, Any]) -> bytes:
    """Return an Arrow stream as a line."""
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
