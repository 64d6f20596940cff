"""The flat buffer: layout, weighted means, buckets on a thread, accumulation."""

from __future__ import annotations

import threading
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybackend.core.collective import Alone
from pybackend.core.engine.exchange.flat_buffer import BufferLayout, FlatExchange, StopAgreement
from pybackend.core.engine.exchange.transports import gather_slices
from pybackend.core.errors import PeerLostError

shapes = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=8)


class Pair:
    """A collective of two ranks, of which the other has ``factor`` times the same values."""

    rank, world_size = 0, 2

    def __init__(self, factor: float = 3.0) -> None:
        self.factor = factor
        self.sizes: list[int] = []

    def all_reduce(self, buffer: Any, codec: Any = None, terms: Any = None) -> None:
        self.sizes.append(len(buffer))
        if terms:
            terms(0, buffer)
        buffer *= 1 + self.factor

    def all_gather(self, part: Any) -> list[Any]:
        return [part, part]


class Broken(Pair):
    """A collective whose peer has exited."""

    def all_reduce(self, buffer: Any, codec: Any = None, terms: Any = None) -> None:
        raise PeerLostError(1, "far", "closed the connection")


def exchange(layout: BufferLayout, collective: Any = None, **options: Any) -> FlatExchange:
    found = collective or Alone()
    return FlatExchange(found, layout, np.float32, StopAgreement(), nominal=lambda: 8.0, **options)


@given(shapes, st.sampled_from([1, 100, 300, 1e9]))
def test_every_gradient_has_a_place_of_its_own(shapes: Any, bucket_bytes: float) -> None:
    layout = BufferLayout.of(shapes, 4, bucket_bytes)
    taken = np.zeros(layout.size, int)
    for shape, span in zip(shapes, layout.spans, strict=True):
        assert span.stop - span.start == np.prod(shape, dtype=int)
        assert span.start % 16 == 0  # 64 bytes
        taken[span] += 1
    assert taken.max(initial=0) <= 1
    assert taken[-3:].sum() == 0  # the tail
    assert sorted(n for bucket in layout.buckets for n in bucket) == list(range(len(shapes)))
    assert [n for bucket in layout.buckets for n in bucket] == list(range(len(shapes)))[::-1]
    assert layout.ranges[0].start == 0
    assert all(a.stop == b.start for a, b in zip(layout.ranges, layout.ranges[1:], strict=False))
    for part in layout.ranges[:-1]:
        assert (part.stop - part.start) * 4 >= bucket_bytes


def test_means_are_weighted_by_rows() -> None:
    arrays = [np.array([[1.0, 2.0]], "float32"), np.array(4.0, "float32")]
    flat = exchange(BufferLayout.of([(1, 2), ()], 4, 1e9), Pair(factor=3.0))
    means, total = flat.exchange(5.0, 2.0, arrays)
    # The other rank's weights, gradients and loss sums are three times this one's.
    assert total == 20.0
    np.testing.assert_allclose(means[0], arrays[0])
    assert means[1].shape == ()
    assert flat.mean_loss == pytest.approx(2.0)


@given(shapes, st.sampled_from([100, 1e9]), st.lists(st.integers(0, 300), max_size=4))
def test_terms_in_pieces_are_those_of_the_whole(
    shapes: Any, bucket_bytes: float, cuts: list[int]
) -> None:
    layout = BufferLayout.of(shapes, 4, bucket_bytes)
    flat = np.arange(layout.size, dtype="float32")  # where there is no gradient, its own values
    arrays = [np.full(shape, 10.0 * n, "float32") for n, shape in enumerate(shapes)]
    for bucket, (numbers, part) in enumerate(zip(layout.buckets, layout.ranges, strict=True)):
        terms = exchange(layout)._terms(flat, bucket, 0.5, [arrays[n] for n in numbers])
        wanted = flat[part].copy()
        for n in numbers:
            span = layout.spans[n]
            wanted[span.start - part.start : span.stop - part.start] = 5.0 * n
        ends = sorted({0, len(wanted), *(cut for cut in cuts if cut < len(wanted))})
        found = np.full_like(wanted, np.nan)
        for start, stop in pairwise(ends):
            terms(start, found[start:stop])
        np.testing.assert_array_equal(found, wanted)


def test_a_checkpoint_may_have_other_buckets() -> None:
    shapes = [(20,), (40,)]
    few, many = (exchange(BufferLayout.of(shapes, 4, size), Pair(1.0)) for size in (1e9, 100))
    few.accumulate(0.5, 0.0, [np.full(shape, 3.0, "float32") for shape in shapes], is_due=False)
    many.restore_state(few.read_state())
    zeros = [np.zeros(shape, "float32") for shape in shapes]
    means, _ = many.accumulate(0.5, 0.0, zeros, is_due=True)
    assert [mean.tolist() for mean in means] == [[3.0] * 20, [3.0] * 40]
    many.close()


def test_memory_is_used_again_only_when_nobody_refers_to_it() -> None:
    flat = exchange(BufferLayout.of([(3,), (5,)], 4, 1e9))
    ones, zeros = ([np.full(n, value, "float32") for n in (3, 5)] for value in (1, 0))
    kept, _ = flat.exchange(1.0, 0.0, ones)
    others, _ = flat.exchange(1.0, 0.0, zeros)
    assert kept[0].tolist() == [1, 1, 1]  # TensorFlow may still refer to it
    assert all(array.ctypes.data % 64 == 0 for array in (*kept, *others))
    part = kept[1][:1]
    place = kept[0].ctypes.data
    del kept
    again, _ = flat.exchange(1.0, 0.0, zeros)
    assert part.tolist() == [1]  # one view of it is enough
    assert again[0].ctypes.data != place
    del part
    assert flat.exchange(1.0, 0.0, zeros)[0][0].ctypes.data == place


@pytest.mark.parametrize("turn", [[0, 1], [1, 0]], ids=["in order", "out of order"])
def test_buckets_travel_in_one_order_however_they_come(turn: list[int]) -> None:
    peer = Pair()
    flat = exchange(BufferLayout.of([(20,), (40,), (60,)], 4, 100), peer)
    arrays = [np.full(n, n, "float32") for n in (20, 40, 60)]
    assert flat.layout.buckets == ((2,), (1,), (0,))
    for _ in range(3):
        peer.sizes.clear()
        for bucket in [2, *turn]:
            flat.post(bucket, 1.0, [arrays[n] for n in flat.layout.buckets[bucket]])
        means, _ = flat.collect(1.0, 0.0)
        for mean, array in zip(means, arrays, strict=True):
            np.testing.assert_allclose(mean, array)
        assert peer.sizes == [64, 48, 32 + 3]
    flat.close()


def test_a_lost_peer_is_reported_when_the_buckets_are_collected() -> None:
    flat = exchange(BufferLayout.of([(20,), (40,)], 4, 100), Broken())
    flat.post(0, 1.0, [np.ones(40, "float32")])
    flat.post(1, 1.0, [np.ones(20, "float32")])
    with pytest.raises(PeerLostError, match="worker 1 on far"):
        flat.collect(1.0, 0.0)
    flat.close()


def test_no_thread_outlives_the_exchange() -> None:
    before = set(threading.enumerate())
    flat = exchange(BufferLayout.of([(20,), (40,)], 4, 100), Pair())
    threads = set(threading.enumerate()) - before
    assert [thread.name for thread in threads] == ["tfdist-exchange"]
    flat.close()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def test_accumulated_gradients_travel_once() -> None:
    peer = Pair(factor=1.0)
    flat = exchange(BufferLayout.of([(4,)], 4, 1e9), peer)
    steps = [np.full(4, value, "float32") for value in (1.0, 2.0, 6.0)]
    for number, step in enumerate(steps):
        means, _ = flat.accumulate(0.5, 0.0, [step], is_due=number == 2)
        if number < 2:
            assert peer.sizes == []
            assert not means[0].any()
    assert len(peer.sizes) == 1
    np.testing.assert_allclose(means[0], np.full(4, 9.0))


def test_a_request_to_stop_reaches_all() -> None:
    agreement = StopAgreement()
    flat = FlatExchange(
        Pair(), BufferLayout.of([(1,)], 4, 1e9), np.float32, agreement, nominal=lambda: 1.0
    )
    flat.exchange(1.0, 0.0, [np.ones(1, "float32")])
    assert not agreement.is_agreed
    agreement.is_requested = True
    flat.exchange(1.0, 0.0, [np.ones(1, "float32")])
    assert agreement.is_agreed


def test_slices_of_all_workers_stay_apart() -> None:
    indices, values = np.array([7, 3, 7]), np.array([[1.0], [2.0], [3.0]], "float32")
    found, rows = gather_slices(Pair(), indices, values)
    assert found.tolist() == [7, 3, 7, 7, 3, 7]
    assert rows.tolist() == [[1.0], [2.0], [3.0], [1.0], [2.0], [3.0]]
