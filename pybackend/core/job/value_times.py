"""Dates, times and time zones as values that workers send."""

from __future__ import annotations

import datetime
import sys
import zoneinfo
from collections.abc import Sequence
from typing import Any

from pybackend.core.job.value_kind import UnfitError, ValueKind, exactly, is_of


def _of_clock(kind: Any) -> ValueKind:
    return exactly(
        kind,
        lambda v: [v.replace(tzinfo=None).isoformat(), v.fold, v.tzinfo],
        lambda text, fold, zone: kind.fromisoformat(text).replace(fold=fold, tzinfo=zone),
        lambda _, __: ".tzinfo",
    )


def _take_offset(value: datetime.timezone) -> Sequence[Any]:
    offset, name = value.utcoffset(None), value.tzname(None)
    return [offset] if name == datetime.timezone(offset).tzname(None) else [offset, name]


def _take_zone(value: zoneinfo.ZoneInfo) -> Sequence[Any]:
    if value.key is None or zoneinfo.ZoneInfo(value.key) is not value:
        raise UnfitError("it differs from the system's time zone with the same name")
    return [value.key]


def _take_stamp(value: Any) -> Sequence[Any]:
    # pandas chooses the class of time zones that are given as names.
    zone = value.tzinfo
    parts = [value.to_datetime64(), str(zone) if type(zone).__module__.startswith("pytz") else zone]
    again = _make_stamp(*parts)
    if any(
        getattr(again, name) != getattr(value, name) for name in ("value", "unit", "fold", "tzinfo")
    ):
        raise UnfitError("pandas turns its instant and time zone into a different timestamp")
    return parts


def _make_stamp(instant: Any, zone: Any) -> Any:
    import pandas as pd

    stamp = pd.Timestamp(instant)
    return stamp if zone is None else stamp.tz_localize("UTC").tz_convert(zone)


def _make_span(span: Any) -> Any:
    import pandas as pd

    return pd.Timedelta(span)


def _missing(name: str) -> ValueKind:
    """Return the kind of one of pandas's missing values."""

    def matches(value: Any) -> bool:
        pandas = sys.modules.get("pandas")
        return pandas is not None and value is getattr(pandas, name, pandas)

    def make() -> Any:
        import pandas as pd

        return getattr(pd, name)

    return ValueKind(name, matches, lambda _: [], make)


TIMES: tuple[ValueKind, ...] = (
    _of_clock(datetime.datetime),
    _of_clock(datetime.time),
    exactly(datetime.date, lambda v: [v.isoformat()], datetime.date.fromisoformat),
    exactly(datetime.timedelta, lambda v: [v.days, v.seconds, v.microseconds]),
    exactly(datetime.timezone, _take_offset),
    # Raises an error for paths outside its folder.
    exactly(zoneinfo.ZoneInfo, _take_zone),
    _missing("NaT"),
    _missing("NA"),
    ValueKind(
        "timestamp",
        is_of("pandas", "Timestamp"),
        _take_stamp,
        _make_stamp,
        lambda _, __: ".tzinfo",
    ),
    ValueKind("span", is_of("pandas", "Timedelta"), lambda v: [v.to_timedelta64()], _make_span),
)
