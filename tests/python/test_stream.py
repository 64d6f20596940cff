"""Streams over TCP and TLS: both have the same functions, and the layers above them work."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
import pytest
from threads import Threads

import pybackend
from pybackend.core.net.authentication import new_token
from pybackend.core.net.rendezvous import listen
from pybackend.core.net.stream import Stream, StreamEndError, wait_any
from pybackend.core.net.tls import Tls

LONG = 30.0

Pair = tuple[Stream, Stream]
TOKEN = new_token()


@pytest.fixture(params=["tcp", "tls"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    """Both ends of a connection, the connecting one first."""
    with ExitStack() as stack:
        server = stack.enter_context(listen("127.0.0.1"))
        near = stack.enter_context(closing(Stream.connect(server.getsockname(), LONG)))
        far = stack.enter_context(closing(Stream.accept(server)))
        if request.param == "tls":
            with Threads() as pool:
                protected = pool.submit(far.protect, Tls(TOKEN, is_server=True), LONG)
                near.protect(Tls(TOKEN, is_server=False), LONG)
                protected.result()
        yield near, far


def test_only_one_file_uses_sockets_past_tls() -> None:
    root = Path(pybackend.__file__).parent
    users = {
        str(path.relative_to(root))
        for path in root.rglob("*.py")
        if re.search(r"sendmsg|recvmsg|MSG_PEEK|MSG_DONTWAIT", path.read_text())
    }
    assert users == {"core/net/stream.py"}


def test_exactly_so_many_bytes_are_read(pair: Pair) -> None:
    near, far = pair
    near.send_all(bytes(range(200)), LONG)
    assert far.read_exactly(50, LONG) == bytes(range(50))
    assert far.peek(10, LONG) == bytes(range(50, 60))
    assert far.read_exactly(0) == b""
    assert far.read_exactly(150, LONG) == bytes(range(50, 200))
    assert far.peek(1) is None


def test_large_contents_cross_in_both_directions_at_once(pair: Pair) -> None:
    contents = [np.random.default_rng(rank).bytes(8_000_003) for rank in range(2)]
    with Threads() as pool:
        readers = [pool.submit(stream.read_exactly, 8_000_003, LONG) for stream in pair]
        for stream, content in zip(pair, contents, strict=True):
            pool.submit(stream.send_all, content, LONG)
        same = [reader.result() == contents[1 - rank] for rank, reader in enumerate(readers)]
    assert all(same)


def test_several_buffers_are_sent_and_filled_in_order(pair: Pair) -> None:
    near, far = pair
    sent, received = bytes(range(100)), bytearray(100)
    out = [memoryview(sent)[:30], memoryview(sent)[30:]]
    into = [memoryview(received)[:70], memoryview(received)[70:]]
    while out:
        out = forward(out, near.send_some(out))
        assert not out or wait_any([], [near], LONG)
    assert far.peek(3, LONG) == bytes(range(3))
    while into:
        assert far.wait_readable(LONG)
        into = forward(into, far.receive_some(into))
    assert received == sent


def forward(buffers: list[memoryview], count: int) -> list[memoryview]:
    """Return the rest of some buffers after this number of bytes."""
    while buffers and count >= len(buffers[0]):
        count -= len(buffers[0])
        buffers = buffers[1:]
    return [buffers[0][count:], *buffers[1:]] if buffers else []


def test_a_byte_that_tls_has_decrypted_counts_as_readable(pair: Pair) -> None:
    near, far = pair
    near.send_all(b"ab", LONG)
    assert far.read_exactly(1, LONG) == b"a"
    assert far.wait_readable(0)
    assert wait_any([far], [], 0) == [far]
    assert far.read_exactly(1, LONG) == b"b"
    assert not far.wait_readable(0)
    assert wait_any([far], [], 0) == []


def test_a_peek_waits_for_the_first_byte_and_takes_none(pair: Pair) -> None:
    near, far = pair
    threading.Timer(0.1, near.send_all, (b"late",)).start()
    assert far.peek(1, LONG) == b"l"
    assert far.peek(4, LONG) == b"late"
    assert far.read_exactly(4, LONG) == b"late"
    near.close()
    assert far.peek(1, LONG) == b""


def test_lines_are_read_one_by_one_and_a_broken_last_one_is_dropped(pair: Pair) -> None:
    near, far = pair
    long = b"x" * 300_000 + b"\n"
    near.send_all(b"one\n\ntwo\n", LONG)
    assert [far.read_line(4, LONG) for _ in range(3)] == [b"one\n", b"\n", b"two\n"]
    with Threads() as pool:
        line = pool.submit(far.read_line, 300_001, LONG)
        near.send_all(long + b"unfin", LONG)
        assert line.result() == long
    near.send_all(b"ished", LONG)
    near.close()
    assert far.read_line(100, LONG) == b""


@pytest.mark.parametrize("line", [b"12345\n", b"1234567"], ids=["ended", "without end"])
def test_a_line_beyond_the_limit_is_an_error(pair: Pair, line: bytes) -> None:
    near, far = pair
    near.send_all(line, LONG)
    with pytest.raises(ValueError, match="a line of more than 5 bytes"):
        far.read_line(5, LONG)


READS: dict[str, Callable[[Stream, float | None], object]] = {
    "read_exactly": lambda stream, seconds: stream.read_exactly(3, seconds),
    "read_line": lambda stream, seconds: stream.read_line(10, seconds),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_silent_end_is_a_timeout(
    pair: Pair, read: Callable[[Stream, float | None], object]
) -> None:
    near, far = pair
    near.send_all(b"ab", LONG)
    with pytest.raises(TimeoutError):
        read(far, 0.05)


def test_an_end_that_does_not_read_is_a_timeout(pair: Pair) -> None:
    with pytest.raises(TimeoutError, match=r"not read anything for 0\.1 s"):
        pair[0].send_all(bytes(100_000_000), 0.1)


def test_the_end_within_a_message_is_reported(pair: Pair) -> None:
    near, far = pair
    near.send_all(b"ab", LONG)
    near.close()
    with pytest.raises(StreamEndError):
        far.read_exactly(3, LONG)


@pytest.mark.parametrize("closed_by_reader", [False, True], ids=["other end", "own end"])
def test_closing_wakes_a_reader(pair: Pair, closed_by_reader: bool) -> None:
    near, far = pair
    with Threads() as pool:
        reading = pool.submit(far.read_exactly, 1)
        (far if closed_by_reader else near).close()
        assert isinstance(reading.exception(LONG), OSError)


def test_a_closed_stream_can_only_fail(pair: Pair) -> None:
    near, _ = pair
    near.close()
    near.close()
    with pytest.raises(OSError):
        near.send_all(b"x", LONG)
    with pytest.raises(OSError):
        near.read_exactly(1, LONG)
    with pytest.raises(OSError):
        wait_any([near], [], LONG)
