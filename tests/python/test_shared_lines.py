"""Connections of several members over one pair of pipes."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import pytest

from pybackend.core.job.messages import PrintedLine
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.meeting_client import MeetingClient
from pybackend.core.net.shared_lines import SharedLines
from pybackend.core.net.stream import StreamEndError


class Ends:
    """Both ends of such a pair, and their threads."""

    def __init__(self) -> None:
        here, to_here = os.pipe()
        there, to_there = os.pipe()
        self.pipes = [os.fdopen(here, "rb"), os.fdopen(to_there, "wb", buffering=0)]
        self.driver = SharedLines(*self.pipes)
        others = [os.fdopen(there, "rb"), os.fdopen(to_here, "wb", buffering=0)]
        self.host = SharedLines(*others)
        self.pipes += others
        self.threads: list[threading.Thread] = []

    def start(self) -> None:
        for end in (self.driver, self.host):
            thread = threading.Thread(target=end.read)
            thread.start()
            self.threads.append(thread)

    def close(self) -> None:
        self.pipes[1].close()
        self.pipes[3].close()
        for thread in self.threads:
            thread.join(60)
        self.pipes[0].close()
        self.pipes[2].close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.close()


def test_members_meet_and_report_without_a_listening_socket(ends: Ends) -> None:
    with MeetingServer(None, "", 2) as meeting:
        assert meeting.address == ""
        lost = threading.Semaphore(0)
        clients = [
            MeetingClient(None, "", rank, 0.0, lost.release, stream=ends.host.connect(rank))
            for rank in range(2)
        ]
        for rank in range(2):
            meeting.adopt(ends.driver.connect(rank), rank)
        ends.start()
        ends.host.beat()
        found: list[list[str] | None] = []
        other = threading.Thread(target=lambda: found.append(clients[1].gather("one")))
        other.start()
        found.append(clients[0].gather("zero"))
        other.join(60)
        assert found == [["zero", "one"]] * 2
        content = os.urandom(1 << 20)
        clients[1].send("report", content)
        clients[1](PrintedLine("done"))
        assert meeting.queue.get(timeout=60) == PrintedLine("done", rank=1)
        assert meeting.result(1, "report") == content
        ends.pipes[1].close()  # the driver closes it
        for _ in range(2):
            assert lost.acquire(timeout=60)
        ends.pipes[3].close()
        meeting.drain(60)
        assert [meeting.has_left(rank) for rank in range(2)] == [True, True]


def test_a_line_that_is_too_long_or_does_not_come_is_an_error(ends: Ends) -> None:
    connection = ends.driver.connect(3)
    sender = ends.host.connect(3)
    ends.start()
    with pytest.raises(TimeoutError):
        connection.read_line(5, seconds=0.01)
    sender.send_all(b"a longer line\nand\nmore")
    with pytest.raises(ValueError, match="more than 5 bytes"):
        connection.read_line(5)
    assert connection.read_line(50) == b"a longer line\n"
    assert connection.read_exactly(6) == b"and\nmo"
    connection.close()
    with pytest.raises(StreamEndError):
        connection.read_exactly(3)
    assert connection.read_line(5) == b""
    assert connection.read_line(5) == b""
