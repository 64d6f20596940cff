"""Workers that meet at the driver, over real sockets."""

from __future__ import annotations

import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from typing import Any

import pytest
from conftest import wait_for
from threads import Threads

from pybackend.core.errors import ClusterError
from pybackend.core.job.codec import encode
from pybackend.core.job.messages import PrintedLine
from pybackend.core.net.authentication import greet_as_client, greet_as_server, new_token
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.meeting_client import MeetingClient
from pybackend.core.net.stream import Stream

TOKEN = new_token()


class Worker:
    """A client, and an event that is set when it loses the driver."""

    def __init__(self, address: str, rank: int, token: str = TOKEN, patience: float = 60.0) -> None:
        self.rank = rank
        self.lost = threading.Event()
        self.client = MeetingClient(address, token, rank, patience, self.lost.set)
        self.client.require()


@pytest.fixture
def join() -> Iterator[Callable[..., Worker]]:
    """Create workers, and close them after the test."""
    workers: list[Worker] = []

    def joined(server: MeetingServer, rank: int, token: str = TOKEN) -> Worker:
        workers.append(Worker(server.address, rank, token))
        return workers[-1]

    yield joined
    for worker in workers:
        worker.client.close()


Join = Callable[[MeetingServer, int], Worker]


def rush(threads: Threads, workers: list[Worker]) -> list[Any]:
    """Return the result of each worker's `gather`: messages, None, or its error."""

    def gather(worker: Worker) -> Any:
        try:
            return worker.client.gather(str(worker.rank))
        except ClusterError as error:
            return error

    return [threads.submit(gather, worker) for worker in workers]


def test_all_meet_elsewhere_if_one_does_not_come_in_time(join: Join) -> None:
    with (
        MeetingServer("127.0.0.1", TOKEN, 3, patience=0.5) as server,
        Threads() as threads,
    ):
        waiting = rush(threads, [join(server, 0), join(server, 1)])
        assert [answer.result(timeout=30) for answer in waiting] == [None, None]
        # The decision also holds for a late worker.
        assert join(server, 2).client.gather("2") is None


@pytest.mark.parametrize("first", [True, False], ids=["then the others join", "others wait"])
def test_all_meet_elsewhere_if_one_leaves_before_it_has_joined(join: Join, first: bool) -> None:
    with (
        MeetingServer("127.0.0.1", TOKEN, 3, patience=60) as server,
        Threads() as threads,
    ):
        workers = [join(server, rank) for rank in range(3)]
        waiting = [] if first else rush(threads, workers[:2])
        if waiting:
            wait_for(lambda: server.missing()[0] == [2])
        workers[2].client.close()
        waiting = waiting or rush(threads, workers[:2])
        assert [answer.result(timeout=30) for answer in waiting] == [None, None]
        assert workers[2].client.gather("2") is None


def test_a_member_without_a_driver_meets_elsewhere_at_once() -> None:
    with MeetingClient(None, TOKEN, 0, 60.0) as client:
        assert not client(PrintedLine("dropped"))
        assert client.gather("0") is None


def test_a_member_that_has_joined_and_loses_the_driver_fails_by_name() -> None:
    """It cannot know the others' decision, so it must neither wait nor meet elsewhere."""
    with socket.create_server(("127.0.0.1", 0)) as listener, Threads() as threads:
        host, port = listener.getsockname()
        client = MeetingClient(f"{host}:{port}", TOKEN, 1, 10.0)
        stream = Stream.accept(listener)
        assert greet_as_server(stream, TOKEN, "meeting") == 1
        waiting = threads.submit(client.gather, "1")
        assert b"Join" in stream.read_line(1000, 10)
        stream.close()
        with pytest.raises(ClusterError, match=r"worker 1 on .* lost the driver"):
            waiting.result(timeout=30)
        client.close()


def test_members_that_come_and_go_at_any_time_all_decide_alike(join: Join) -> None:
    """Cut off one of three at a random moment: all meet here, or all elsewhere, or it fails."""
    draw = random.Random(1)
    with Threads() as threads:
        for _ in range(60):
            with MeetingServer("127.0.0.1", TOKEN, 3, patience=20) as server:
                workers = [join(server, rank) for rank in range(3)]
                wait_for(lambda server=server: 2 in server._streams)
                answers = rush(threads, workers[:2])
                time.sleep(draw.random() * 0.002)
                third = rush(threads, workers[2:])
                time.sleep(draw.random() * 0.002)
                server._streams[2].close()  # the network is cut
                *others, cut = [answer.result(timeout=20) for answer in [*answers, *third]]
            assert others in ([None, None], [["0", "1", "2"]] * 2)
            assert isinstance(cut, ClusterError) or cut == others[0]


@pytest.mark.parametrize("patience", [60.0, math.inf])
def test_everyone_gets_all_messages(join: Join, patience: float) -> None:
    with (
        MeetingServer("127.0.0.1", TOKEN, 3, patience=patience) as server,
        Threads() as threads,
    ):
        workers = [join(server, rank) for rank in (2, 0, 1)]
        found = list(threads.map(lambda w: w.client.gather(f"from {w.rank}"), workers))
        assert found == [["from 0", "from 1", "from 2"]] * 3
        assert server.missing()[0] == []
        for worker in workers:
            worker.client.close()
        assert not any(worker.lost.is_set() for worker in workers)


def test_events_and_large_results_arrive_whole(join: Join) -> None:
    content = bytes(range(256)) * 40_000
    with MeetingServer("127.0.0.1", TOKEN, 2) as server:
        worker = join(server, 1)
        assert worker.client(PrintedLine("hello", rank=7))
        worker.client.send("report", content)
        worker.client.send("empty", b"")
        worker.client.close()
        server.drain(60)
        assert server.result(1, "report") == content
        assert server.result(1, "empty") == b""
        assert server.result(0, "report") is None
        # The rank is that of the authenticated connection, not that of the event.
        assert server.queue.get(timeout=30) == PrintedLine("hello", rank=1)


def test_a_worker_notices_that_the_driver_is_gone(join: Join) -> None:
    with MeetingServer("127.0.0.1", TOKEN, 2) as server, Threads() as threads:
        worker = join(server, 0)
        waiting = threads.submit(worker.client.gather, "alone")
        wait_for(lambda: server.missing()[0] == [1])
        server.__exit__()
        assert worker.lost.wait(30)
        with pytest.raises(ClusterError, match=r"worker 0 on .* lost the driver at .* before all"):
            waiting.result(timeout=30)


@pytest.mark.parametrize("rank", [0, 2, -1])
def test_a_rank_comes_once_and_is_one_of_the_job(join: Join, rank: int) -> None:
    with MeetingServer("127.0.0.1", TOKEN, 2) as server:
        first = join(server, 0)
        first.client(PrintedLine("in"))
        server.queue.get(timeout=30)  # otherwise the second one may be faster
        again = join(server, rank)
        assert again.lost.wait(30)
        assert not first.lost.is_set()


def test_a_greeting_that_ends_after_the_driver_has_left_is_rejected() -> None:
    with MeetingServer("127.0.0.1", TOKEN, 1) as server:
        host, port = server.address.split(":")
        stream = Stream.connect((host, int(port)), 10)
        # The driver's thread waits for this greeting when it closes.
        assert stream.peek(1, 10)
    with closing(stream):
        greet_as_client(stream, TOKEN, 0, "meeting")
        assert stream.peek(1, 10) == b""


def test_a_rejected_greeting_is_tried_again(join: Join) -> None:
    with MeetingServer("127.0.0.1", TOKEN, 1) as server:
        host, port = server.address.split(":")
        crowd = [socket.create_connection((host, int(port)), timeout=10) for _ in range(64)]
        for stranger in crowd:
            stranger.recv(1)
        preemption = threading.Timer(1.0, lambda: [stranger.close() for stranger in crowd])
        preemption.start()
        assert join(server, 0).client(PrintedLine("in"))
        preemption.join()


def test_the_driver_may_be_reached_by_another_address_than_it_listens_on() -> None:
    with MeetingServer("127.0.0.1", TOKEN, 1, announced="10.0.0.7") as server:
        assert server.address.startswith("10.0.0.7:")
    with MeetingServer("127.0.0.1", TOKEN, 1, announced="fd00::7") as server:
        assert server.address.startswith("[fd00::7]:")


def test_a_stranger_is_rejected() -> None:
    with MeetingServer("127.0.0.1", TOKEN, 1) as server:
        with pytest.raises(ClusterError, match="cannot reach the driver"):
            Worker(server.address, 0, new_token(), patience=2.0)
        assert server.missing()[0] == [0]


def test_a_driver_that_is_not_there_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ClusterError, match=r"worker 3 on .* cannot reach the driver at 127.0.0.1"):
        Worker(f"127.0.0.1:{port}", 3, patience=2.0)


def test_a_line_that_is_not_json_ends_the_connection() -> None:
    with MeetingServer("127.0.0.1", TOKEN, 2) as server:
        host, port = server.address.split(":")
        with closing(Stream.connect((host, int(port)), 10)) as stream:
            greet_as_client(stream, TOKEN, 0, "meeting")
            stream.send_all(b"not json\n")
            assert stream.peek(1, 10) == b""


def test_lines_of_many_events_arrive_each_workers_in_order() -> None:
    def work(rank: int) -> None:
        with MeetingClient(server.address, TOKEN, rank, 10.0) as client:
            for number in range(200):
                client(PrintedLine(f"Zeile {number} \u00e4\n"))

    with MeetingServer("127.0.0.1", TOKEN, 4) as server:
        with Threads() as pool:
            list(pool.map(work, range(4)))
        events = [server.queue.get(timeout=30) for _ in range(800)]
    for rank in range(4):
        texts = [event.text for event in events if event and event.rank == rank]
        assert texts == [f"Zeile {number} \u00e4\n" for number in range(200)]


def test_a_large_event_arrives_whole(join: Join) -> None:
    with MeetingServer("127.0.0.1", TOKEN, 1) as server:
        join(server, 0).client(PrintedLine("x" * 500_000))
        assert server.queue.get(timeout=30) == PrintedLine("x" * 500_000)


def test_lines_without_a_greeting_are_not_read() -> None:
    with MeetingServer("127.0.0.1", TOKEN, 1) as server:
        host, port = server.address.split(":")
        with socket.create_connection((host, int(port)), timeout=30) as stranger:
            stranger.sendall(encode(PrintedLine("x")).encode() + b"\n" + bytes(100))
            received = 0
            with suppress(ConnectionResetError):
                while part := stranger.recv(100):
                    received += len(part)
        assert received <= 33
        assert server.queue.empty()


def test_a_driver_behind_a_firewall_delays_no_worker() -> None:
    # A listener with a full queue drops new connections, as a firewall does.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as stack:
        address = server.getsockname()
        for _ in range(2):
            knocking = stack.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex(address)
        began = time.monotonic()
        client = MeetingClient(f"127.0.0.1:{address[1]}", TOKEN, 0, 4.0)
        assert not client(PrintedLine("x"))
        assert time.monotonic() - began < 3
        client.close()
        assert 3 < time.monotonic() - began < 60
        assert not client(PrintedLine("after the end"))


def test_a_driver_that_goes_away_does_not_stop_the_worker(join: Join) -> None:
    with MeetingServer("127.0.0.1", TOKEN, 1) as server:
        worker = join(server, 0)
        worker.client(PrintedLine("first"))
        server.queue.get(timeout=30)
    for _ in range(100):
        worker.client(PrintedLine("x" * 100_000))


def test_a_closed_server_no_longer_listens() -> None:
    with MeetingServer("127.0.0.1", TOKEN, 1) as server:
        host, port = server.address.split(":")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((host, int(port)), timeout=30)
