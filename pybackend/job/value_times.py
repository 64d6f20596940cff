"""Dates, times and time zones as values that workers send, Python's and those of pandas."""

from __future__ import annotations

import datetime
import sys
import zoneinfo
from collections.abc import Callable
from typing import Any

from pybackend.job.value_kind import Fields, Pack, UnfitError, Unpack, ValueKind, is_exactly, is_of


def _pack_clock(value: Any, pack: Pack) -> Fields:
    text = value.replace(tzinfo=None).isoformat()
    return {"text": text, "fold": value.fold, "zone": pack(value.tzinfo, ".tzinfo")}


def _unpack_clock(read: Callable[[str], Any]) -> Callable[[Fields, Unpack], Any]:
    def unpack_clock(fields: Fields, unpack: Unpack) -> Any:
        naive = read(fields["text"])
        return naive.replace(fold=fields["fold"], tzinfo=unpack(fields["zone"]))

    return unpack_clock


def _pack_offset(value: datetime.timezone, pack: Pack) -> Fields:
    offset, name = value.utcoffset(None), value.tzname(None)
    is_named = name != datetime.timezone(offset).tzname(None)
    return {"offset": pack(offset, " (its offset)"), "name": name if is_named else None}


def _unpack_offset(fields: Fields, unpack: Unpack) -> datetime.timezone:
    given = [unpack(fields["offset"]), *([] if fields["name"] is None else [fields["name"]])]
    return datetime.timezone(*given)


def _pack_zone(value: zoneinfo.ZoneInfo, _: Pack) -> Fields:
    if value.key is None or zoneinfo.ZoneInfo(value.key) is not value:
        raise UnfitError("it is not the system's time zone of its name")
    return {"key": value.key}


def _unpack_zone(fields: Fields, _: Unpack) -> zoneinfo.ZoneInfo:
    return zoneinfo.ZoneInfo(fields["key"])  # raises an error for paths outside its folder


def _pack_stamp(value: Any, pack: Pack) -> Fields:
    # pandas chooses the class of time zones that are given as names.
    zone, is_named = value.tzinfo, type(value.tzinfo).__module__.startswith("pytz")
    fields = {"instant": pack(value.to_datetime64(), ""), "by_name": is_named}
    fields["zone"] = str(zone) if is_named else pack(zone, ".tzinfo")
    again = _make_stamp(value.to_datetime64(), str(zone) if is_named else zone)
    if any(
        getattr(again, name) != getattr(value, name) for name in ("value", "unit", "fold", "tzinfo")
    ):
        raise UnfitError("pandas makes a different timestamp of its instant and time zone")
    return fields


def _unpack_stamp(fields: Fields, unpack: Unpack) -> Any:
    zone = str(fields["zone"]) if fields["by_name"] else unpack(fields["zone"])
    return _make_stamp(unpack(fields["instant"]), zone)


def _make_stamp(instant: Any, zone: Any) -> Any:
    import pandas as pd

    stamp = pd.Timestamp(instant)
    return stamp if zone is None else stamp.tz_localize("UTC").tz_convert(zone)


def _unpack_span(fields: Fields, unpack: Unpack) -> Any:
    import pandas as pd

    return pd.Timedelta(unpack(fields["span"]))


def _is_pandas(name: str) -> Callable[[Any], bool]:
    def matches(value: Any) -> bool:
        pandas = sys.modules.get("pandas")
        return pandas is not None and value is getattr(pandas, name, pandas)

    return matches


def _unpack_pandas(name: str) -> Callable[[Fields, Unpack], Any]:
    def unpack_pandas(_: Fields, __: Unpack) -> Any:
        import pandas as pd

        return getattr(pd, name)

    return unpack_pandas


TIMES: tuple[ValueKind, ...] = (
    ValueKind(
        "datetime",
        is_exactly(datetime.datetime),
        _pack_clock,
        _unpack_clock(datetime.datetime.fromisoformat),
    ),
    ValueKind(
        "time", is_exactly(datetime.time), _pack_clock, _unpack_clock(datetime.time.fromisoformat)
    ),
    ValueKind(
        "date",
        is_exactly(datetime.date),
        lambda v, _: {"text": v.isoformat()},
        lambda fields, _: datetime.date.fromisoformat(fields["text"]),
    ),
    ValueKind(
        "timedelta",
        is_exactly(datetime.timedelta),
        lambda v, _: {"parts": [v.days, v.seconds, v.microseconds]},
        lambda fields, _: datetime.timedelta(*fields["parts"]),
    ),
    ValueKind("offset", is_exactly(datetime.timezone), _pack_offset, _unpack_offset),
    ValueKind("time zone", is_exactly(zoneinfo.ZoneInfo), _pack_zone, _unpack_zone),
    *(
        ValueKind(tag, _is_pandas(tag), lambda _, __: {}, _unpack_pandas(tag))
        for tag in ("NaT", "NA")
    ),
    ValueKind("timestamp", is_of("pandas", "Timestamp"), _pack_stamp, _unpack_stamp),
    ValueKind(
        "span",
        is_of("pandas", "Timedelta"),
        lambda v, pack: {"span": pack(v.to_timedelta64(), "")},
        _unpack_span,
    ),
)
