"""Workers that meet at the driver, over real sockets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest
from conftest import wait_for

from pybackend.errors import ClusterError
from pybackend.net import meeting
from pybackend.net.meeting import MeetingClient, MeetingServer
from pybackend.net.rendezvous import greet_as_client, new_token
from pybackend.net.stream import Stream

TOKEN = new_token()


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "_CONNECT_SECONDS", 2.0)


class Worker:
    """A client, and whether it has been told that the driver is gone."""

    def __init__(self, address: str, rank: int, token: str = TOKEN) -> None:
        self.rank = rank
        self.lost = threading.Event()
        self.client = MeetingClient(address, token, rank, self.lost.set)


@pytest.fixture
def join() -> Iterator[Callable[..., Worker]]:
    """Makes workers, and closes them after the test."""
    workers: list[Worker] = []

    def joined(server: MeetingServer, rank: int, token: str = TOKEN) -> Worker:
        workers.append(Worker(server.address, rank, token))
        return workers[-1]

    yield joined
    for worker in workers:
        worker.client.close()


Join = Callable[[MeetingServer, int], Worker]


def test_everyone_gets_all_messages_in_several_rounds(join: Join) -> None:
    with MeetingServer("127.0.0.1", TOKEN, 3) as server, ThreadPoolExecutor(3) as threads:
        workers = [join(server, rank) for rank in (2, 0, 1)]
        for number in range(3):
            sent = [{"rank": w.rank, "number": number} for w in workers]
            found = list(threads.map(lambda w, m: w.client.gather(m), workers, sent))
            assert found == [[{"rank": rank, "number": number} for rank in range(3)]] * 3
        assert server.missing()[0] == []
        for worker in workers:
            worker.client.close()
        assert not any(worker.lost.is_set() for worker in workers)


def test_events_and_large_results_arrive_whole(join: Join) -> None:
    content = bytes(range(256)) * 40_000
    with MeetingServer("127.0.0.1", TOKEN, 2) as server:
        worker = join(server, 1)
        assert worker.client({"event": "line", "text": "hello", "rank": 7})
        worker.client.send("report", content)
        worker.client.send("empty", b"")
        worker.client.close()
        server.drain(10)
        assert server.result(1, "report") == content
        assert server.result(1, "empty") == b""
        assert server.result(0, "report") is None
        # The rank is that of the proven connection, whatever the event says.
        assert server.queue.get(timeout=5) == {"event": "line", "text": "hello", "rank": 1}


def test_a_worker_hears_that_the_driver_is_gone(join: Join) -> None:
    with MeetingServer("127.0.0.1", TOKEN, 2) as server, ThreadPoolExecutor(1) as threads:
        worker = join(server, 0)
        waiting = threads.submit(worker.client.gather, "alone")
        wait_for(lambda: server.missing()[0] == [1])
        server.__exit__()
        assert worker.lost.wait(10)
        with pytest.raises(ClusterError, match="ended the job before all workers had met"):
            waiting.result(timeout=10)


@pytest.mark.parametrize("rank", [0, 2, -1])
def test_a_rank_comes_once_and_is_one_of_the_job(join: Join, rank: int) -> None:
    with MeetingServer("127.0.0.1", TOKEN, 2) as server:
        first = join(server, 0)
        again = join(server, rank)
        assert again.lost.wait(10)
        assert not first.lost.is_set()


def test_a_greeting_that_ends_after_the_driver_has_left_is_no_welcome() -> None:
    with MeetingServer("127.0.0.1", TOKEN, 1) as server:
        host, port = server.address.split(":")
        stream = Stream.connect((host, int(port)), 10)
        # The driver's thread waits for this greeting when it closes.
        assert stream.peek(1, 10)
    with closing(stream):
        greet_as_client(stream, TOKEN, 0, "meeting")
        assert stream.peek(1, 10) == b""


def test_a_door_with_a_crowd_is_tried_again(join: Join) -> None:
    with MeetingServer("127.0.0.1", TOKEN, 1) as server:
        host, port = server.address.split(":")
        crowd = [socket.create_connection((host, int(port)), timeout=10) for _ in range(64)]
        for stranger in crowd:
            stranger.recv(1)
        leaving = threading.Timer(1.0, lambda: [stranger.close() for stranger in crowd])
        leaving.start()
        assert join(server, 0).client({"event": "line", "text": "in"})
        leaving.join()


def test_the_driver_may_be_reached_by_another_address_than_it_listens_on() -> None:
    with MeetingServer("127.0.0.1", TOKEN, 1, announced="10.0.0.7") as server:
        assert server.address.startswith("10.0.0.7:")
    with MeetingServer("127.0.0.1", TOKEN, 1, announced="fd00::7") as server:
        assert server.address.startswith("[fd00::7]:")


def test_a_stranger_is_turned_away() -> None:
    with MeetingServer("127.0.0.1", TOKEN, 1) as server:
        with pytest.raises(ClusterError, match="cannot reach the driver"):
            Worker(server.address, 0, new_token())
        assert server.missing()[0] == [0]


def test_a_driver_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ClusterError, match=r"worker 3 on .* cannot reach the driver at 127.0.0.1"):
        Worker(f"127.0.0.1:{port}", 3)


def test_what_is_no_line_of_json_ends_the_connection() -> None:
    with MeetingServer("127.0.0.1", TOKEN, 2) as server:
        host, port = server.address.split(":")
        with closing(Stream.connect((host, int(port)), 10)) as stream:
            greet_as_client(stream, TOKEN, 0, "meeting")
            stream.send_all(b"not json\n")
            assert stream.peek(1, 10) == b""
