"""Values of workers' functions: plain data there and back, and nothing else."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pybackend.errors import SerializationError
from pybackend.job.values import decode_value, encode_value

dtypes = st.one_of(
    hnp.boolean_dtypes(),
    hnp.integer_dtypes(),
    hnp.unsigned_integer_dtypes(),
    hnp.floating_dtypes(),
    hnp.complex_number_dtypes(),
    hnp.unicode_string_dtypes(min_len=1, max_len=5),
    hnp.byte_string_dtypes(min_len=1, max_len=5),
)
arrays = dtypes.flatmap(
    lambda dtype: hnp.arrays(dtype, hnp.array_shapes(min_dims=0, min_side=0, max_side=4))
)
scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(max_size=50)
)
keys = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.tuples(st.integers()))
values = st.recursive(
    scalars | arrays,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Equal in type and value, NaN like NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, float) and math.isnan(one):
        return math.isnan(other)
    return bool(one == other)


@settings(deadline=None)
@given(values)
def test_plain_data_come_back_as_they_were(value: Any) -> None:
    assert same(decode_value(encode_value(value)), value)


@settings(deadline=None)
@given(st.one_of(st.integers(0, 100), st.floats(0, 100)), st.sampled_from("bBhHiIlLfg?"))
def test_numpy_numbers_come_back_with_their_type(number: float, code: str) -> None:
    value = np.array(number).astype(code)[()]
    again = decode_value(encode_value(value))
    assert (type(again), again) == (type(value), value)


def test_arrays_come_back_by_index_whatever_their_layout() -> None:
    array = np.arange(24, dtype=">i4").reshape(2, 3, 4)
    for view in (array, array.T, array[:, ::-1, ::2], np.asfortranarray(array)):
        again = decode_value(encode_value(view))
        assert again.dtype == view.dtype
        assert again.tolist() == view.tolist()
        again[...] = 0  # it can be written to


def test_mutable_bytes_come_back_as_bytes() -> None:
    assert decode_value(encode_value(bytearray(b"ab"))) == b"ab"


def test_the_text_is_json_that_any_language_reads() -> None:
    assert json.loads(encode_value([1, "a", None])) == [1, "a", None]


@pytest.mark.parametrize(
    ("value", "place", "kind"),
    [
        (object(), "the returned value is a ", "builtins.object"),
        ([1, {2, 3}], "the returned value[1] is a ", "builtins.set"),
        ({"a": (0, print)}, "the returned value['a'][1] is a ", "builtin"),
        ({"m": {"deep": [None, 1j]}}, "the returned value['m']['deep'][1] is a ", "complex"),
        ({frozenset(): 1}, "a key of the returned value is a ", "frozenset"),
        (np.array([object()]), "the returned value is an array of ", "object"),
        ([np.array(["2026-01-01"], "M8[D]")], "the returned value[0] is an array of ", "datetime"),
    ],
    ids=["object", "set", "function", "complex", "key", "object array", "dates"],
)
def test_other_objects_are_refused_with_their_place(value: Any, place: str, kind: str) -> None:
    with pytest.raises(SerializationError) as caught:
        encode_value(value)
    assert str(caught.value).startswith(place)
    assert kind in str(caught.value)


def test_a_model_is_told_how_to_travel() -> None:
    with pytest.raises(SerializationError, match="model_to_base64"):
        encode_value(object())


TEXT = encode_value({"a": np.arange(3.0), "b": (b"xyz", [1, None, "text"]), "c": np.float32(2)})


def test_truncated_text_is_refused() -> None:
    for end in range(len(TEXT)):
        with pytest.raises(SerializationError, match="damaged"):
            decode_value(TEXT[:end])


@settings(deadline=None)
@given(st.integers(0, len(TEXT) - 1), st.characters(codec="ascii"))
def test_altered_text_gives_a_value_or_a_serialization_error(place: int, other: str) -> None:
    altered = TEXT[:place] + other + TEXT[place + 1 :]
    with suppress(SerializationError):
        decode_value(altered)


def tagged(**fields: Any) -> str:
    return json.dumps({"__tfdist__": "array", "dtype": "<f8", "shape": [1], "data": "", **fields})


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: 5,
        lambda: '{"a": 1}',
        lambda: '{"__tfdist__": "code", "source": "import os"}',
        lambda: '{"__tfdist__": "dict", "pairs": [[[1], 2]]}',
        lambda: '{"__tfdist__": "tuple"}',
        lambda: tagged(dtype="O"),
        lambda: tagged(dtype="no such type"),
        lambda: tagged(dtype=None, data=5),
        lambda: tagged(shape=[2]),
        lambda: tagged(shape=[10**30]),
        lambda: tagged(shape="wide"),
        lambda: tagged(data="?"),
        lambda: "[" * 100_000,
    ],
)
def test_damaged_text_is_a_serialization_error(make: Callable[[], Any]) -> None:
    with pytest.raises(SerializationError):
        decode_value(make())
