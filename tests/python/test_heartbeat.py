"""A member or driver without heartbeats counts as lost, and no other one does."""

from __future__ import annotations

import socket
import threading
import time
from contextlib import closing

from conftest import wait_for
from threads import Threads

from pybackend.job.messages import PrintedLine
from pybackend.net.heartbeat import read_lines
from pybackend.net.meeting import MeetingServer
from pybackend.net.meeting_client import MeetingClient
from pybackend.net.rendezvous import new_token
from pybackend.net.stream import Stream

TOKEN = new_token()
SILENCE = 2.5


def test_who_shows_no_sign_of_life_counts_as_lost() -> None:
    lost = threading.Event()
    with (
        MeetingServer("127.0.0.1", TOKEN, 2, silence=SILENCE) as server,
        MeetingClient(server.address, TOKEN, 0, 10, lost.set, silence=SILENCE) as quiet,
        MeetingClient(server.address, TOKEN, 1, 10) as stopped,
    ):
        server.start_beating(SILENCE)
        quiet.start_beating(SILENCE)
        quiet.require()
        stopped.require()
        wait_for(lambda: server.silent() == [1])
        wait_for(lambda: stopped.has_ended)  # it learns of it when it continues
        assert not stopped.is_silent
        assert not lost.wait(SILENCE)
        assert quiet(PrintedLine("here"))
        assert server.queue.get(timeout=30) == PrintedLine("here")
        assert server.silent() == [1]
        server._closed.set()  # its heartbeats stop, and its connections stay open
        assert lost.wait(30)
        assert quiet.is_silent


def test_a_line_that_takes_long_to_come_is_a_sign_of_life() -> None:
    with (
        closing(socket.create_server(("127.0.0.1", 0))) as server,
        closing(Stream.connect(server.getsockname(), 10)) as near,
        closing(Stream.accept(server)) as far,
        Threads() as threads,
    ):
        read = threads.submit(lambda: list(read_lines(far, 1000, 2.0)))
        for letter in b"slow\n":
            near.send_all(bytes([letter]))
            time.sleep(0.5)
        near.close()
        assert read.result(30) == [b"slow\n"]
