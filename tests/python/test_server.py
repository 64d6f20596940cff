"""Feeds between a task and a worker: rows, results, waits and ends."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from conftest import wait_for

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.net.authentication import new_token
from pybackend.tfos.feed.client import Feeder, split_items
from pybackend.tfos.feed.items import encode_items, frame_items
from pybackend.tfos.feed.server import FeedServer
from pybackend.tfos.reservation import Client, Server

HOST = "127.0.0.1"
TOKEN = new_token()


@pytest.fixture
def server() -> Iterator[FeedServer]:
    made = FeedServer(HOST, TOKEN)
    yield made
    made.finish()


def feeder(*servers: FeedServer, timeout: float = 60.0) -> Feeder:
    return Feeder({rank: server.address for rank, server in enumerate(servers)}, TOKEN, timeout)


def batches(items: Any) -> Iterator[Any]:
    return map(encode_items, split_items(iter(items)))


class Running:
    """Run a call on a thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._found.append(self._try(call)))
        self._thread.start()

    def result(self) -> Any:
        self._thread.join()
        found = self._found[0]
        if isinstance(found, Exception):
            raise found
        return found

    def _try(self, call: Callable[[], Any]) -> Any:
        try:
            return call()
        except Exception as error:
            return error


def take_all(server: FeedServer, size: int = 7) -> list[Any]:
    items: list[Any] = []
    has_ended = False
    while not has_ended:
        found, has_ended = server.queue.take(size)
        items += found
    return items


def test_all_rows_of_all_feeds_are_taken_once(server: FeedServer) -> None:
    taken = Running(lambda: take_all(server))
    rows = [list(range(n * 1000, n * 1000 + 1000)) for n in range(3)]
    feeds = [
        Running(lambda n=n: feeder(server).feed(batches(rows[n]), "a", n, 0)) for n in range(3)
    ]
    assert [feed.result() for feed in feeds] == [1000] * 3
    feeder(server).close()
    found = taken.result()
    assert sorted(found) == sorted(itertools.chain(*rows))
    for part in rows:  # each feed's in its order
        assert [row for row in found if row in set(part)] == part


def test_results_go_back_to_their_own_rows(server: FeedServer) -> None:
    sizes = []

    def answer() -> None:
        has_ended = False
        while not has_ended:
            items, has_ended = server.queue.take(100, keeps_apart=True)
            sizes.append(len(items))
            server.queue.give([item * item for item in items])

    answered = Running(answer)
    rows = [list(range(n * 1000, n * 1000 + 130)) for n in range(4)]
    infer = feeder(server).infer
    feeds = [Running(lambda n=n: list(infer(batches(rows[n]), "a", n, 0))) for n in range(4)]
    for feed, part in zip(feeds, rows, strict=True):
        assert feed.result() == [row * row for row in part]
    feeder(server).close()
    answered.result()
    assert max(sizes) == 100


def test_a_function_that_takes_nothing_fails_the_feed_by_name(server: FeedServer) -> None:
    with pytest.raises(ClusterError, match=r"worker 0 .* took no row for 0.2 s"):
        feeder(server, timeout=0.2).feed(batches(range(10)), "a", 0, 0)
    with pytest.raises(ClusterError, match=r"took no row for 0.2 s"):  # without a wait
        feeder(server, timeout=1e9).feed(batches(range(10)), "a", 1, 0)


def test_a_feed_waits_while_rows_pile_up(server: FeedServer) -> None:
    server.queue._most_bytes = 1000
    produced = []

    def rows() -> Iterator[int]:
        for number in range(50_000_000):
            produced.append(number)
            yield number

    fed = Running(lambda: feeder(server).feed(batches(rows()), "a", 0, 0))
    assert server.queue.take(3) == ([0, 1, 2], False)
    server.queue.stop()
    assert fed.result() >= 3
    assert len(produced) < 10_000_000


def test_a_task_that_is_tried_again_goes_on_behind_the_rows_that_were_taken(
    server: FeedServer,
) -> None:
    def lose() -> Iterator[Any]:
        yield encode_items(list(range(10)))
        assert server.queue.take(4) == ([0, 1, 2, 3], False)
        raise OSError("the task was lost")

    with pytest.raises(OSError, match="the task was lost"):
        feeder(server).feed(lose(), "a", 5, 0)
    taken = Running(lambda: server.queue.take(6))
    assert feeder(server).feed(batches(range(10)), "a", 5, 1) == 10
    assert taken.result() == ([4, 5, 6, 7, 8, 9], False)


def test_a_task_lost_while_the_queue_is_full_gives_no_row_twice(server: FeedServer) -> None:
    server.queue._most_bytes = 1  # so that the worker waits for space, and does not read
    rows = list(range(600))
    given: list[int] = []

    def lose() -> Iterator[Any]:
        for batch in batches(rows):
            yield batch
            if not given:
                given.extend(server.queue.take(20)[0])

    zombie = Running(lambda: feeder(server).feed(lose(), "a", 0, 1))
    wait_for(lambda: len(given) == 20 and server.queue.feeds == 1)
    again = Running(lambda: feeder(server).feed(batches(rows), "a", 0, 2))
    with pytest.raises(ClusterError, match="was lost while it was fed"):
        zombie.result()
    while len(given) < 600:
        given += server.queue.take(1)[0]
    assert again.result() == 600
    assert given == rows
    with pytest.raises(ClusterError, match="later attempt"):
        feeder(server).feed(batches(rows), "a", 0, 1)


def test_a_task_tried_again_whose_rows_are_others_is_refused(server: FeedServer) -> None:
    fed = Running(lambda: feeder(server).feed(batches(range(60)), "a", 0, 0))
    assert len(server.queue.take(60)[0]) == fed.result() == 60
    for others in (range(59, -1, -1), range(30)):
        with pytest.raises(
            ClusterError, match="differ from those taken before, or are in a different order"
        ):
            feeder(server).feed(batches(others), "a", 0, 1)
    assert feeder(server).feed(batches(range(60)), "a", 0, 2) == 60
    wait_for(lambda: server.queue.feeds == 0)  # the feeder learns of the end first


def test_a_task_tried_again_cannot_do_without_a_worker_that_has_returned(
    server: FeedServer,
) -> None:
    other = FeedServer(HOST, TOKEN)
    with_both = feeder(server, other)
    fed = Running(lambda: with_both.feed(batches(range(5)), "a", 0, 0))
    assert len(server.queue.take(5)[0]) == fed.result() == 5
    other.finish()
    with pytest.raises(ClusterError, match="retried a task, but worker 1"):
        with_both.feed(batches(range(5)), "a", 0, 1)
    fed = Running(lambda: with_both.feed(batches(range(5)), "a", 1, 3))  # it has started nothing
    assert len(server.queue.take(5)[0]) == fed.result() == 5


def test_results_reach_a_slow_reader_after_the_function_has_returned(
    server: FeedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pybackend.tfos.feed.server._FINISH_SECONDS", 0.0)
    may_read = threading.Event()
    text = "x" * 1_000_000

    def read_slowly() -> int:
        results = feeder(server).infer(batches(range(50)), "a", 0, 0)
        first = next(results)
        may_read.wait()
        return len(first) + sum(map(len, results))

    read = Running(read_slowly)
    # Fewer than wanted: the reader has sent the end, and sends nothing while it reads slowly.
    assert len(server.queue.take(51, keeps_apart=True)[0]) == 50
    for _ in range(50):
        server.queue.give([text])
    finished = Running(server.finish)
    time.sleep(0.2)
    may_read.set()
    assert read.result() == 50 * len(text)
    finished.result()


def test_columns_are_arrays_of_tables_and_lists_of_all_else(server: FeedServer) -> None:
    feed = server.queue.open(False, 0)
    assert feed is not None
    table = pa.record_batch({"x": [[1.0], [2.0], [3.0]], "n": [1, 2, 3], "left": ["out"] * 3})
    server.queue.add(feed, frame_items(table, gives_arrays=True))
    server.queue.add(feed, encode_items([([4.0], 4), ([5.0], 5)]))
    server.queue.end(feed)
    (x, n), has_ended = server.queue.take_columns(2, 2)
    np.testing.assert_array_equal(x, np.array([[1.0], [2.0]]), strict=True)
    assert (n.dtype, n.tolist(), has_ended) == (np.dtype("int64"), [1, 2], False)
    assert server.queue.take_columns(2, 2) == ([[[3.0], [4.0]], [3, 4]], False)
    server.queue.close()
    assert server.queue.take_columns(2, 2) == ([[[5.0]], [5]], True)
    assert server.queue.take_columns(2, 2) == ([[], []], True)
    server.queue.remove(feed)


def test_the_worker_that_the_fewest_tasks_feed_is_chosen(server: FeedServer) -> None:
    other = FeedServer(HOST, TOKEN)
    with_both = feeder(server, other)
    # Two feeds: with one, the second task would be a new attempt at the partition.
    feeds = [Running(lambda n=n: with_both.feed(batches(range(5)), n, 0, 0)) for n in "ab"]
    wait_for(lambda: (server.queue.feeds, other.queue.feeds) == (1, 1))
    found = [server.queue.take(5)[0], other.queue.take(5)[0]]
    assert found == [list(range(5))] * 2
    assert [feed.result() for feed in feeds] == [5, 5]
    other.finish()


def test_feeders_hear_of_a_failure_and_of_the_end(server: FeedServer) -> None:
    fed = Running(lambda: feeder(server).feed(batches(itertools.count()), "a", 0, 0))
    server.queue.take(1)
    server.queue.fail("ValueError: no such luck")
    with pytest.raises(ClusterError, match="no such luck"):
        fed.result()
    with pytest.raises(ClusterError, match="no such luck"):  # a later one, too
        list(feeder(server).infer(batches(range(3)), "a", 1, 0))
    server.finish()
    with pytest.raises(ClusterError, match="no worker is taking rows anymore"):
        feeder(server).feed(batches(range(3)), "a", 2, 0)


def test_inference_without_a_result_for_each_row_is_an_error(server: FeedServer) -> None:
    fed = Running(lambda: list(feeder(server).infer(batches(range(5)), "a", 0, 0)))
    server.queue.take(5)
    server.queue.give([1, 2])
    server.queue.stop()
    with pytest.raises(ClusterError, match="ended the feed after 2 results for at least 5 rows"):
        fed.result()
    with pytest.raises(InputError, match="4 more results than"):
        server.queue.give([0] * 7)


def test_a_stranger_feeds_nothing(server: FeedServer) -> None:
    with pytest.raises(ClusterError, match=r"does not know|closed the connection"):
        Feeder({0: server.address}, new_token(), 1.0).feed(batches([1]), "a", 0, 0)
    wait_for(lambda: server.queue.feeds == 0)  # the feeder learns of the end first


def test_more_nodes_register_than_greet_at_once() -> None:
    nodes = 80
    reservations = Server(nodes)
    address = reservations.start()
    clients = [Running(lambda: Client(address)) for _ in range(nodes)]
    for number, client in enumerate(clients):
        client.result().register({"node": number})
    assert len(reservations.await_reservations(timeout=30)) == nodes
    for client in clients:
        client.result().close()
    reservations.stop()
    with pytest.raises(InputError, match="has no token"):
        Client((address[0], address[1]))  # type: ignore[arg-type]


def test_missing_results_are_named(server: FeedServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pybackend.tfos.feed.server._OWED_SECONDS", 0.2)
    monkeypatch.setattr("pybackend.tfos.feed.server._LOOK_SECONDS", 0.05)
    fed = Running(lambda: list(feeder(server, timeout=1.0).infer(batches(range(10)), "a", 0, 0)))
    assert len(server.queue.take(20, keeps_apart=True)[0]) == 10
    server.queue.give([1, 2])
    with pytest.raises(InputError, match="received 2 results for the 10 rows of a partition"):
        server.queue.take(20, keeps_apart=True)
    with pytest.raises(
        ClusterError, match=r"returned no result for 1 s .*, after 2 results for 10 rows"
    ):
        fed.result()
