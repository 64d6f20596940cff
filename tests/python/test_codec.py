"""Messages between processes: what is written is read back, and no other objects are created."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pybackend.core.errors import Failure
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.messages import Arrival, EpochEnded, Event, Failed, Note, Order, read_event
from pybackend.core.job.report import WorkerReport

numbers = st.integers(0, 4096)
texts = st.text(max_size=20)


@dataclass(frozen=True)
class Steps:
    every: int = 1


@dataclass(frozen=True)
class Sum:
    bits: Literal[16, 32] | None = None


@dataclass(frozen=True)
class Nested:
    """All types of fields."""

    exchange: Steps | Sum
    pairs: tuple[tuple[int, float], ...] = ()
    shape: tuple[int, str] | None = None
    mode: Literal["a", "b"] | bool = True


@given(
    st.builds(
        Nested,
        exchange=st.builds(Steps, every=numbers) | st.builds(Sum, bits=st.sampled_from([16, 32])),
        pairs=st.lists(st.tuples(numbers, st.floats(allow_nan=False))).map(tuple),
        shape=st.none() | st.tuples(numbers, texts),
        mode=st.sampled_from(["a", "b", True, False]),
    )
)
def test_nested_dataclasses_travel_as_json(value: Nested) -> None:
    assert decode(encode(value), Nested) == value


@given(
    st.builds(EpochEnded, numbers, numbers, st.floats(0, 1e9), st.dictionaries(texts, numbers))
    | st.builds(Note, texts, rank=numbers)
    | st.builds(Failed, st.builds(Failure, numbers, texts, texts, texts, time=st.floats(0, 1e9)))
)
def test_events_travel_as_one_line(event: Event) -> None:
    line = encode(event)
    assert "\n" not in line
    assert read_event(line) == event


def test_an_order_and_an_arrival_travel() -> None:
    order = Order("secret", ("a:1", "b:2"), (), {"train": [3, 4]})
    arrival = Arrival("a:1", "a", {"keras": None}, {"train": {"rows": 3}}, None, True)
    assert decode(encode(order), Order) == order
    assert decode(encode(arrival), Order, Arrival) == arrival


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("not json", "Expecting value"),
        ("[]", r"the message is \[\], not Note"),
        ('{"text": "x"}', r"not Note"),
        ('{"__type__": "Job", "text": "x"}', "not Note"),
        ('{"__type__": "Note"}', "Note without text"),
        ('{"__type__": "Note", "text": "x", "more": 1}', "Note has no field more"),
        ('{"__type__": "Note", "text": 3}', "Note.text is 3, not <class 'str'>"),
        ('{"__type__": "Note", "text": "x", "rank": true}', "Note.rank is True"),
        ('{"__type__": "Note", "text": {"__type__": "Note"}}', "Note.text is"),
    ],
)
def test_what_is_wrong_with_a_message_is_named(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        decode(text, Note)


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("exchange", {"__type__": "Nested"}, "not Steps or Sum"),
        ("exchange", None, "Nested.exchange is None"),
        ("pairs", [[1, 2.0, 3.0]], "Nested.pairs has 3 items, not 2"),
        ("pairs", {}, "not a list"),
        ("shape", [1], "Nested.shape is"),
        ("mode", 1, "Nested.mode is 1"),
        ("mode", "c", "Nested.mode is 'c'"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: object, reason: str) -> None:
    good = json.loads(encode(Nested(Steps())))
    with pytest.raises(ValueError, match=reason):
        decode(json.dumps({**good, field: value}), Nested)


def test_a_whole_number_may_stand_for_a_float() -> None:
    report = decode(
        '{"__type__": "WorkerReport", "rank":0,"host":"h","pid":1,"seconds":2}', WorkerReport
    )
    assert (report.seconds, type(report.seconds)) == (2.0, float)
