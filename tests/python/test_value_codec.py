"""Values of workers' functions: plain data are sent back, and nothing else."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, make_dataclass
from datetime import UTC, datetime, time, timedelta, timezone
from decimal import Decimal
from enum import Enum, Flag, IntEnum
from fractions import Fraction
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import SimpleNamespace
from typing import Any, NamedTuple
from uuid import UUID
from zoneinfo import ZoneInfo

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from pyspark.ml.linalg import DenseVector, SparseVector
from pyspark.sql import Row

from pybackend.core.errors import SerializationError
from pybackend.core.job.value_codec import decode_value, encode_value


@dataclass(frozen=True)
class Settings:
    """Draw a value that a worker may return; its own checks do not run again."""

    rate: Any
    layers: Any = ()

    def __post_init__(self) -> None:
        if isinstance(self.rate, str) and self.rate == "refused":
            raise AssertionError("the driver has built it by its class's code")


class Point(NamedTuple):
    x: Any
    y: Any


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
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(),
    st.binary(max_size=50),
    st.complex_numbers(allow_nan=False),
    st.datetimes(timezones=st.sampled_from([None, UTC, timezone(timedelta(hours=-3.5))])),
    st.dates(),
    st.times(),
    st.timedeltas(),
    st.decimals(allow_nan=False),
    st.sets(st.integers() | st.text(), max_size=3),
    st.frozensets(st.dates(), max_size=3),
    st.text("ab/.", min_size=1).map(Path),
)
keys = st.one_of(st.none(), st.booleans(), st.integers(), st.text(), st.tuples(st.integers()))
values = st.recursive(
    scalars | arrays,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(keys, inner, max_size=4),
        st.builds(Settings, inner, inner),
        st.builds(Point, inner, inner),
    ),
    max_leaves=12,
)


def same(one: Any, other: Any) -> bool:
    """Return whether values are equal in type and value, with NaN equal to NaN."""
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
    if isinstance(one, Settings):
        return same(vars(one), vars(other))
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


class Color(IntEnum):
    RED = 1


class Name(str, Enum):  # noqa: UP042 - as users write it
    RED = "red"


class Rights(Flag):
    READ = 1
    WRITE = 2


@dataclass
class Slotted:
    __slots__ = ("rate",)
    rate: Any


@pytest.mark.parametrize(
    "value",
    [
        bytearray(b"ab"),
        10**5000,
        -(2**2001),
        "\ud83d\ude00",
        np.float64(1.5),
        np.str_("text"),
        np.bytes_(b""),
        np.datetime64(5, "us"),
        Color.RED,
        Name.RED,
        Rights.WRITE,
        OrderedDict([("b", 1), ("a", 2)]),
        Counter("abba"),
        defaultdict(list, a=[1]),
        defaultdict(None, a=1),
        deque([1, "a"], maxlen=3),
        range(2**70, 0, -3),
        Fraction(2**70, 3),
        UUID(int=5),
        np.array([["a", None], [1, Decimal("1.5")]], dtype=object),
        np.empty((0, 2), object),
        Slotted([1]),
        datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=ZoneInfo("Europe/Berlin")),
        time(2, 30, fold=1, tzinfo=timezone(timedelta(hours=1), "CET")),
        ZoneInfo("UTC"),
        PureWindowsPath("C:\\a"),
        PurePosixPath("a/b"),
        pd.NaT,
        pd.NA,
        pd.Timedelta(1, "ns"),
        pd.Timestamp("2026-01-01 00:00:00.123456789"),
        pd.Timestamp("2026-01-01", unit="s").as_unit("s"),
        pd.Timestamp("2026-10-25 01:30:00.000000001", tz="UTC").tz_convert("Europe/Berlin"),
        pd.Timestamp("2026-10-25 02:30", tz=timezone(timedelta(hours=1))),
        Row(b=1, a=[2]),
        Row("x", "y"),
        SparseVector(4, [1, 3], [1.0, 2.5]),
        DenseVector([0.5, 2.0]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_of_special_classes_come_back_as_they_were(value: Any) -> None:
    again = decode_value(encode_value({"parts": [value]}))["parts"][0]
    assert type(again) is type(value)
    if not isinstance(value, int):  # Python prints no more than some thousand digits
        assert repr(again) == repr(value)
    for name in ("fold", "unit", "tzinfo", "__fields__"):
        assert getattr(again, name, None) == getattr(value, name, None)
    if isinstance(value, np.ndarray):
        assert again.shape == value.shape
    elif not isinstance(value, (type(pd.NaT), type(pd.NA), Slotted)):
        assert again == value


@dataclass
class Many(list[int]):
    rate: int = 3


@dataclass
class Problem(Exception):
    rate: int = 3


@dataclass
class Guarded:
    rate: int = 3

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def __del__(self) -> None:
        ENDED.append(self)


ENDED: list[Any] = []


class Checked:
    def __set__(self, owner: Any, value: Any) -> None:
        vars(owner)["hidden"] = value
        ENDED.append(value)

    def __get__(self, owner: Any, kind: Any = None) -> Any:
        return vars(owner).get("hidden", 0) if owner is not None else 0


@dataclass
class WithDescriptor:
    rate: Any = Checked()


@dataclass
class Mutable:
    rate: Any


def with_attribute(value: Any) -> Any:
    value.more = 5
    return value


class Pair(NamedTuple("Pair", [("x", int)])):
    """Its objects can have other attributes."""


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (np.ma.masked_array([1, 2], [True, False]), "MaskedArray, which would be changed"),
        (np.arange(2).view(np.recarray), "recarray, which would"),
        (np.str_("a\0"), "str_, which would"),
        (defaultdict(lambda: 1, a=1), r"defaultdict, cannot be sent: its default factory is code"),
        (type("Text", (str,), {})("a"), "plain str"),
        (Rights.READ | Rights.WRITE, "combination of enum members"),
        (Many(4), "is more than a dataclass"),
        (Problem(4), "is more than a dataclass"),
        (Guarded(), "__del__"),
        (WithDescriptor(1), "besides its fields|runs code to set"),
        (with_attribute(Mutable(1)), "an attribute 'more' besides its fields"),
        (with_attribute(Pair(1)), "an attribute 'more' besides its fields"),
        (pd.DataFrame({"a": pd.arrays.SparseArray([0, 1])}), "Sparse pandas data"),
        (pd.DataFrame({"a": [1, object()]}), r"\['a'\]\[1\] is a builtins.object"),
        (pd.Series([1]).set_flags(allows_duplicate_labels=False), "allows_duplicate_labels"),
        (pd.Timestamp("2026-01-01").to_period("D"), "is a pandas"),
        (pa.table({"a": [1]}).select([]), "it has 1 rows, but no columns"),
        (pa.table({"a": pa.array([b"\xff"]).view(pa.string())}), "(?i)invalid utf8"),
    ],
)
def test_what_would_change_is_refused(value: Any, reason: str) -> None:
    with pytest.raises(SerializationError, match=reason) as caught:
        encode_value([value])
    assert str(caught.value).startswith("the returned value[0]")


def test_the_text_is_json_that_any_language_reads() -> None:
    assert json.loads(encode_value([1, "a", None])) == [1, "a", None]


@pytest.mark.parametrize(
    ("value", "place", "kind"),
    [
        (object(), "the returned value is a ", "builtins.object"),
        ([1, slice(3)], "the returned value[1] is a ", "builtins.slice"),
        ({"a": (0, print)}, "the returned value['a'][1] is a ", "builtin"),
        ({"m": {"deep": [None, {Ellipsis}]}}, "the returned value['m']['deep'][1][0] is a ", "ell"),
        (Settings([object()]), "the returned value.rate[0] is a ", "builtins.object"),
        (Point(0, json), "the returned value.y is a ", "module"),
        ({frozenset({json}): 1}, "a key of the returned value[0] is a ", "module"),
        (np.array([object()]), "the returned value[0] is a ", "builtins.object"),
        ([pd.DataFrame({"a": [1, {2}, json]})], "the returned value[0]['a'][2] is a ", "module"),
    ],
    ids=["object", "slice", "function", "set", "dataclass", "tuple", "key", "array", "frame"],
)
def test_other_objects_are_refused_with_their_place(value: Any, place: str, kind: str) -> None:
    with pytest.raises(SerializationError) as caught:
        encode_value(value)
    assert str(caught.value).startswith(place)
    assert kind in str(caught.value)


def test_a_model_is_told_how_to_travel() -> None:
    with pytest.raises(SerializationError, match="model_to_base64"):
        encode_value(object())


def test_a_value_that_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(SerializationError, match="contains itself"):
        encode_value(value)


def test_tables_come_back_as_they_were() -> None:
    frame = pd.DataFrame(
        {"a": [1, 2], "b": ["x", None], "c": pd.Categorical(["u", "v"]), "d": [[1.0], [2.0, 3.0]]},
        index=pd.Index(["i", "j"], name="row"),
    )
    series = pd.Series([1.5, 2.5], index=pd.date_range("2026-01-01", periods=2), name=("p", 3))
    table = pa.table({"x": [1, None], "y": pa.array([["a"], []], pa.list_(pa.string()))})
    again = decode_value(
        encode_value([frame, series, table, table.to_batches()[0], series.iloc[:0]])
    )
    pd.testing.assert_frame_equal(again[0], frame)
    pd.testing.assert_series_equal(again[1], series, check_freq=False)
    assert again[2].equals(table)
    assert again[3].equals(table.to_batches()[0])
    assert list(again[4]) == []


def test_frames_come_back_with_every_object_in_them() -> None:
    stamps = pd.date_range("2026-03-29", periods=4, freq="h", tz="Europe/Berlin")
    frame = pd.DataFrame(
        {
            "objects": [2**60 + 1, None, (1, [2]), {3}],
            5: [1, None, pd.NA, pd.NaT],
            ("a", 1): pd.array([1, None, 3, 4], dtype="Int8"),
            "lists": [[1.0], np.arange(2), {"a": 1}, "text"],
            "times": stamps.as_unit("s"),
            "kinds": pd.Categorical([1, 2, 1, None], [2, 1], ordered=True),
            "half": np.array([1, np.nan, 0.5, 2], np.float16),
        },
        index=stamps,
    )
    frame.attrs["unit"] = ["h"]
    again = decode_value(encode_value(frame))
    assert same(list(again.columns), list(frame.columns))
    for label in frame:
        assert again[label].dtype == frame[label].dtype
        for one, other in zip(again[label], frame[label], strict=True):
            assert one is other or same(one, other)
    assert again.index.equals(stamps)
    assert (again.index.freq, again.attrs) == (stamps.freq, frame.attrs)
    for index in (
        pd.RangeIndex(2, 8, 3, name="r"),
        pd.MultiIndex.from_arrays([["a", "b"], [1, 2]], names=["x", None]),
        pd.Index([1, (2, 3)], tupleize_cols=False, name=("n", 1)),
        pd.period_range("2026-01", periods=2, freq="M"),
        pd.interval_range(0, 2),
        pd.Index([True, False]),
    ):
        for columns in (["a", "a"], []):
            frame = pd.DataFrame([[1, 2.5][: len(columns)]] * 2, index=index, columns=columns)
            again = decode_value(encode_value(frame))
            assert again.index.identical(index)
            assert type(again.index) is type(index)
            pd.testing.assert_frame_equal(again, frame)
        alone = decode_value(encode_value(index))
        assert alone.identical(index)
        assert type(alone) is type(index)


@pytest.mark.parametrize("kind", ["table", "data frame"])
def test_arrow_data_that_grow_when_read_are_refused(kind: str) -> None:
    def written(table: Any, **options: Any) -> str:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as to:
            to.write(table)
        return base64.b64encode(sink.getvalue().to_pybytes()).decode()

    zeros = pa.table({"values": pa.array(np.zeros(1 << 20))})
    dictionary = pa.table({"values": pa.array(["a" * 9999]).dictionary_encode()})
    for table, options in (
        (zeros, {"compression": "zstd"}),
        (dictionary, {"compression": "lz4"}),
        (pa.table({"values": pa.nulls(9)}), {}),
        (pa.table({"values": pa.array(["a"])}), {"types": ["int64"]}),
    ):
        types = options.pop("types", [str(table.schema.field(0).type)])
        parts = [{"bytes": [written(table, **options)]}, types]
        if kind == "data frame":
            rows = {"range index": [0, table.num_rows, 1, None]}
            parts = [
                {"range index": [0, 1, 1, None]},
                rows,
                {"dict": []},
                [{"table": parts}, "object"],
            ]
        elif pa.types.is_null(table.schema.field(0).type):
            continue  # a table of nulls takes no memory
        with pytest.raises(SerializationError, match=r"compressed|no space|unknown here"):
            decode_value(json.dumps({kind: parts}))


def test_no_code_of_a_class_runs_and_none_is_imported() -> None:
    text = encode_value(Settings("allowed")).replace("allowed", "refused")
    assert decode_value(text).rate == "refused"
    for module in ("antigravity", "os", "json", "no.such.module"):
        other = text.replace(Settings.__module__, module)
        assert decode_value(other) == SimpleNamespace(rate="refused", layers=())


def test_a_class_that_runs_code_when_set_or_ended_is_not_built() -> None:
    text = encode_value(Mutable(1))
    for kind in (Guarded, WithDescriptor, Problem):
        ENDED.clear()
        other = decode_value(text.replace('"Mutable"', f'"{kind.__name__}"'))
        assert (other, ENDED) == (SimpleNamespace(rate=1), [])


def test_an_unknown_dataclass_keeps_its_fields_and_a_named_tuple_its_names() -> None:
    def make() -> type[Any]:
        class Local(NamedTuple):
            x: int

        return Local

    local = make_dataclass("Local", ["x"])(5)
    assert decode_value(encode_value(local)) == SimpleNamespace(x=5)
    again = decode_value(encode_value(make()(6)))
    assert (again, again.x, type(again).__name__) == ((6,), 6, "Local")


def test_an_enum_that_is_not_known_keeps_name_and_value() -> None:
    text = encode_value(Color.RED).replace(Color.__module__, "no.such.module")
    assert decode_value(text) == SimpleNamespace(name="RED", value=1)


TEXT = encode_value(
    {"a": np.arange(3.0), "b": (b"xyz", [1, None, "text"]), "c": np.float32(2)}
    | {"d": [Settings(1), Point(2, 3j), pd.DataFrame({"a": [1, 2]}), datetime(2026, 1, 1), {4}]}
)


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


def tagged(dtype: Any = "<f8", shape: Any = (1,), data: Any = "") -> str:
    return json.dumps({"array": [dtype, shape, data]})


@pytest.mark.parametrize(
    "make",
    [
        lambda: None,
        lambda: 5,
        lambda: '{"a": 1}',
        lambda: '{"a": 1, "dict": []}',
        lambda: '{"code": ["import os"]}',
        lambda: '{"dict": [[1], 2]}',
        lambda: '{"dict": [1]}',
        lambda: '{"tuple": [1]}',
        lambda: '{"bytes": [5]}',
        lambda: '{"bytearray": [1000000000000]}',
        lambda: tagged(dtype="O"),
        lambda: tagged(dtype="no such type"),
        lambda: tagged(dtype=None, data=5),
        lambda: tagged(shape=[2]),
        lambda: tagged(shape=[10**30]),
        lambda: tagged(shape="wide"),
        lambda: tagged(data="?"),
        lambda: "[" * 100_000,
        lambda: '{"date": ["yesterday"]}',
        lambda: '{"Decimal": ["much"]}',
        lambda: '{"Fraction": [1, 0]}',
        lambda: '{"complex": ["1", "2"]}',
        lambda: '{"timedelta": [1e300, 0, 0]}',
        lambda: '{"set": [[[1]]]}',
        lambda: '{"dataclass": ["os"]}',
        lambda: '{"dataclass": ["os", "a", ["x"]]}',
        lambda: '{"named tuple": ["a", "b", ["x"]]}',
        lambda: '{"named tuple": ["a", "b", ["1"], 2]}',
        lambda: '{"data frame": [{"bytes": ["AAAA"]}]}',
        lambda: '{"series": [null, null, {"dict": []}, {"bytes": ["////"]}]}',
    ],
)
def test_damaged_text_is_a_serialization_error(make: Callable[[], Any]) -> None:
    with pytest.raises(SerializationError):
        decode_value(make())
