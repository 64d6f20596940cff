"""Live events: from workers that know the token to the driver, and never in training's way."""

from __future__ import annotations

import json
import queue
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pytest
from pybackend.net.events import EventClient, EventServer

from pybackend.net.rendezvous import greet_as_client, listen, new_token, own_address
from pybackend.net.stream import Stream

TOKEN = new_token()


def where(server: EventServer) -> tuple[str, int]:
    host, _, port = server.address.rpartition(":")
    return host, int(port)


def test_events_of_all_workers_arrive_each_workers_in_order() -> None:
    def work(rank: int) -> None:
        client = EventClient(server.address, TOKEN, rank)
        for number in range(200):
            client({"event": "line", "rank": rank, "text": f"Zeile {number} \u00e4\n"})
        client.close()

    with EventServer("127.0.0.1", TOKEN) as server:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        events = [server.queue.get(timeout=30) for _ in range(800)]
    for rank in range(4):
        texts = [event["text"] for event in events if event["rank"] == rank]
        assert texts == [f"Zeile {number} \u00e4\n" for number in range(200)]


def test_a_large_event_arrives_whole() -> None:
    with EventServer("127.0.0.1", TOKEN) as server:
        client = EventClient(server.address, TOKEN, 0)
        client({"text": "x" * 500_000})
        assert server.queue.get(timeout=30) == {"text": "x" * 500_000}
        client.close()


@pytest.mark.parametrize("token", ["", new_token()])
def test_a_client_without_the_token_sends_nothing(token: str) -> None:
    with EventServer("127.0.0.1", TOKEN) as server:
        client = EventClient(server.address, token, 0)
        client({"event": "epoch"})
        client.close()
        friend = EventClient(server.address, TOKEN, 0)
        friend({"event": "after"})
        assert server.queue.get(timeout=30) == {"event": "after"}
        assert server.queue.empty()
        friend.close()


def test_json_without_a_greeting_is_not_read() -> None:
    with EventServer("127.0.0.1", TOKEN) as server:
        with socket.create_connection(where(server), timeout=30) as stranger:
            stranger.sendall(json.dumps({"event": "epoch"}).encode() + b"\n" + bytes(100))
            received = 0
            try:
                while part := stranger.recv(100):
                    received += len(part)
            except ConnectionResetError:
                pass
        assert received <= 32
        assert server.queue.empty()


def test_what_is_no_json_ends_that_connection_only() -> None:
    with EventServer("127.0.0.1", TOKEN) as server:
        friend = EventClient(server.address, TOKEN, 1)
        with closing(Stream.connect(where(server), 30)) as broken:
            greet_as_client(broken, TOKEN, 0, "events")
            broken.send_all(b'{"event": "first"}\n{"event": \n{"event": "never"}\n')
            assert server.queue.get(timeout=30) == {"event": "first"}
        friend({"event": "second"})
        assert server.queue.get(timeout=30) == {"event": "second"}
        friend.close()


def refuse() -> str:
    with listen("127.0.0.1") as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("address", [None, refuse()], ids=["none", "nobody listens"])
def test_without_a_driver_events_are_dropped(address: Any) -> None:
    client = EventClient(address, TOKEN, 0)
    client({"event": "epoch"})
    client.close()
    client({"event": "after the end"})


def test_a_driver_behind_a_firewall_delays_no_worker() -> None:
    # A listener whose queue is full drops what knocks, as a firewall does.
    with socket.create_server(("127.0.0.1", 0), backlog=0) as server, ExitStack() as stack:
        address = server.getsockname()
        for _ in range(2):
            knocking = stack.enter_context(socket.socket())
            knocking.setblocking(False)
            knocking.connect_ex(address)
        began = time.monotonic()
        client = EventClient(f"127.0.0.1:{address[1]}", TOKEN, 0)
        assert not client({"event": "epoch"})
        assert time.monotonic() - began < 1
        client.close()
        assert 2 < time.monotonic() - began < 8
        assert not client({"event": "after the end"})


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_the_own_address_lies_on_the_way_to_the_peer(host: str) -> None:
    assert own_address(host) in ("127.0.0.1", "::1")


def test_there_is_no_way_to_a_name_without_address() -> None:
    assert own_address("nowhere.invalid") is None


def test_a_driver_that_goes_away_does_not_stop_the_worker() -> None:
    with EventServer("127.0.0.1", TOKEN) as server:
        client = EventClient(server.address, TOKEN, 0)
        client({"event": "first"})
        server.queue.get(timeout=30)
    for _ in range(100):
        client({"event": "x" * 100_000})
    client.close()


def test_the_end_of_the_server_ends_its_connections() -> None:
    with EventServer("127.0.0.1", TOKEN) as server:
        client = Stream.connect(where(server), 30)
        greet_as_client(client, TOKEN, 0, "events")
        client.send_all(b'{"event": "first"}\n')
        server.queue.get(timeout=30)
    with closing(client):
        assert client.peek(1, 30) == b""


def test_a_closed_server_listens_no_more() -> None:
    with EventServer("127.0.0.1", TOKEN) as server:
        address = where(server)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(address, timeout=30)
    with pytest.raises(queue.Empty):
        server.queue.get_nowait()
