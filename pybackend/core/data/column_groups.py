"""Group the columns of a table into tensors, using only their types."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np

from pybackend.core.data.columns import (
    DEFAULT_LABEL,
    ONE_HOT,
    TEXT,
    ColumnGroup,
    ColumnSpec,
    Kinds,
    columns_by_key,
    encoding_of,
    expand_names,
    list_inputs,
)
from pybackend.core.errors import InputError
from pybackend.core.words import REST, either, setting, show, spoken

# A table of pixels has hundreds of columns.
_SHOWN_COLUMNS = 30
# Dates, times and durations, as Arrow, pandas and Spark call their types.
_TIMES = re.compile(r"(extension<pandas\.)?(date|time|duration|interval|period)")
_SPARK_TIMES = re.compile(r"(date)|(timestamp(?:_ntz)?)|interval( .*)?")
# Intervals of numbers or times, which pandas makes.
_INTERVALS = re.compile(r"extension<pandas\.interval|interval\[")


def group_columns(spec: ColumnSpec, kinds: Kinds, floatx: str, name: str) -> list[ColumnGroup]:
    """Return the tensors of a spec.

    ``name`` is the argument that holds the table. An `InputError` names the column and what is
    expected.
    """
    roles = dict.fromkeys(spec.label_columns, "the label")
    for argument in ("tensors", "categories"):
        for column in set(getattr(spec, argument) or {}) - set(roles):
            _check_known(column, kinds, name, f"it is in `{argument}`")
    if twice := roles.keys() & spec.weight_columns:
        raise InputError(f"{show(min(twice))} is given as both the weight and the label")
    roles |= dict.fromkeys(spec.weight_columns, "the weight")
    inputs = list_inputs(spec, kinds)
    targets = columns_by_key("y", spec.label) | columns_by_key("sample_weight", spec.weight)
    for column in [column for columns in inputs.values() for column in columns]:
        _check_known(column, kinds, name)
        if column in roles:
            raise InputError(f"{show(column)} is given as both {roles[column]} and a feature")
    for column, role in roles.items():
        if column == DEFAULT_LABEL and role == "the label":
            role += f", unless `label` names another, or is {show(None)}"
        _check_known(column, kinds, name, role)
    if not any(inputs.values()):
        raise InputError(f"`{name}` has no feature columns, only the label {show(spec.label)}")
    builder = _GroupBuilder(spec, kinds, floatx, name)
    return [builder.group(key, columns) for key, columns in {**inputs, **targets}.items()]


@dataclass(frozen=True)
class _GroupBuilder:
    spec: ColumnSpec
    kinds: Kinds
    floatx: str
    name: str

    def group(self, key: str, columns: Sequence[str]) -> ColumnGroup:
        categories = self._select_categories(columns)
        group = ColumnGroup(key, tuple(columns), None, categories=categories)
        if not group.is_target:
            one_hot = [c for c in categories if encoding_of(self.spec, c) == ONE_HOT]
            group = replace(group, one_hot=tuple(one_hot))
            group = replace(group, names=self._name_numbers(group))
        if len(columns) == 1:
            group = self._describe_single(group, columns[0])
        else:
            if promised := [column for column in columns if column in (self.spec.tensors or {})]:
                raise InputError(
                    f"`tensors` has {show(promised[0])}, which is one of the columns "
                    f"{', '.join(columns)} of a single input: it must be a separate input. List "
                    f"the columns in `features`, e.g. {setting(features=[promised[0]])}"
                )
            dtypes = [self._choose_number_type(column, group) for column in columns]
            common = np.result_type(*map(np.dtype, dtypes))
            group = replace(group, dtype=self.floatx if common.kind == "f" else str(common))
        return self._to_target(group) if group.is_target else group

    def _select_categories(self, columns: Sequence[str]) -> dict[str, tuple[Any, ...]]:
        given = self.spec.categories or {}
        for column in columns:
            if column in given and column in (self.spec.tensors or {}):
                raise InputError(f"{show(column)} is in both `tensors` and `categories`: use one")
            if column in given and self.kinds[column].depth:
                raise self._build_type_error(column, "one value per row, as it is in `categories`")
        return {column: tuple(given[column]) for column in columns if column in given}

    def _name_numbers(self, group: ColumnGroup) -> tuple[str, ...] | None:
        names: list[str] = []
        for column in group.columns:
            kind = self.kinds[column]
            if column in group.one_hot:
                names += expand_names(column, group.categories[column])
            elif column in group.categories or (kind.holds == "number" and not kind.depth):
                names.append(column)
            else:
                return None
        return tuple(names)

    def _describe_single(self, group: ColumnGroup, column: str) -> ColumnGroup:
        kind = self.kinds[column]
        if promise := (self.spec.tensors or {}).get(column):
            return self._apply_tensor_type(group, column, *promise)
        if kind.holds == "text" and kind.depth <= 1 and not (group.is_target or group.categories):
            return replace(group, dtype=TEXT)
        return replace(group, dtype=self._choose_number_type(column, group))

    def _apply_tensor_type(
        self, group: ColumnGroup, column: str, dtype: str, shape: Sequence[int | None]
    ) -> ColumnGroup:
        kind = self.kinds[column]
        if kind.holds not in ("binary", "number"):
            raise self._build_type_error(column, "numbers or bytes, because it is in `tensors`")
        if kind.holds == "binary" and (kind.depth or None in shape):
            expected = f"one bytes value per row, whose shape has no {show(None)}"
            raise self._build_type_error(column, expected)
        if None in shape and kind.depth > 1 and kind.depth != len(shape):
            raise self._build_type_error(
                column,
                f"arrays of the shape {show(shape)} in `tensors`. For arrays of arrays, a shape "
                f"has {show(None)} and the lengths of the inner arrays, e.g. "
                f"{setting(tensors={column: (dtype, (None, *range(3, 2 + kind.depth)))})}",
            )
        # JSON and messages need Python's int, not numpy's.
        sizes = tuple(None if size is None else int(size) for size in shape)
        return replace(group, dtype=np.dtype(dtype).str, shape=sizes)

    def _choose_number_type(self, column: str, group: ColumnGroup) -> str:
        """In which a column's numbers are passed to the model."""
        kind = self.kinds[column]
        if column in group.categories:
            return "int32"
        if kind.holds == "binary" and not kind.depth:
            return "uint8"
        if kind.holds != "number":
            raise self._build_type_error(column, self._explain_expected(group))
        dtype = np.dtype(kind.dtype or "float64")
        if dtype.kind == "b":
            return "int8"
        return self.floatx if dtype.kind == "f" else dtype.name

    def _explain_expected(self, group: ColumnGroup) -> str:
        if group.is_target:
            return "a number (encode classes as 0, 1, 2, ... first, or list them in `categories`)"
        if len(group.columns) > 1:
            return (
                "numbers, arrays of numbers or ML vectors. List the columns to use in `features`; "
                "text needs `categories` or must be a separate input: "
                f"{setting(features={'numbers': [REST], 'text': 'column'})}"
            )
        return (
            "numbers, arrays of numbers, ML vectors, bytes, text or lists of text. List the "
            "columns to use in `features`"
        )

    def _build_type_error(self, column: str, expected: str) -> InputError:
        found = self.kinds[column].name
        if found.startswith("struct<type:") and "indices:" in found:
            expected = (
                "an array: this is an ML vector in the form that Spark writes to files, so "
                "convert it with pyspark.ml.functions.vector_to_array() before you write it"
            )
        elif fields := re.match(r"struct<([^:]+):( ?)", found):
            field, is_arrow = fields.groups()
            example = setting(features=[f"{column}.{field}"])
            expected = f"numbers: name the fields to use, e.g. {example}"
            if is_arrow:
                expected = (
                    "numbers: make columns of its fields (pyarrow: table.flatten(); pandas: "
                    f"pd.json_normalize()), and name those to use, e.g. {example}"
                )
        if _INTERVALS.match(found):
            middle = f"df[{show(column)}].map(lambda i: i.mid)"
            expected = f"numbers: take the middle of its intervals, {middle}"
        elif _TIMES.match(found):
            expected = (
                f"numbers: convert its times, e.g. to {_suggest_number(column, found)}, or leave "
                "the column out of `features`"
            )
        is_label = column in columns_by_key("y", self.spec.label).get("y", [])
        what = f"the label column {show(column)}" if is_label else f"column {show(column)}"
        return InputError(f"{what} of `{self.name}` has type {found}; expected {expected}")

    def _to_target(self, group: ColumnGroup) -> ColumnGroup:
        """Set the type and shape of labels or weights.

        Whole numbers become int64, all others Keras's float type. One number per row has shape ().
        """
        kinds = [self.kinds[column] for column in group.columns]
        is_single = len(kinds) == 1 and not kinds[0].depth and group.shape is None
        if group.key.startswith("sample_weight"):
            return replace(group, dtype=self.floatx, is_flat=is_single)
        is_whole = group.shape is None and np.dtype(group.dtype).kind in "iu"
        is_bytes = kinds[0].holds == "binary"
        dtype = "int64" if is_whole and not is_bytes else group.dtype
        return replace(group, dtype=dtype, is_flat=is_single and not is_bytes)


def _suggest_number(column: str, found: str) -> str:
    if spark := _SPARK_TIMES.fullmatch(found):
        return _suggest_in_spark(column, *spark.groups())
    if spoken() == "R":  # data frames of R do not come here, only files
        return f"days or seconds before you write the files: as.numeric({column})"
    pandas, polars = f"df[{show(column)}]", f"pl.col({show(column)})"
    if "period" in found:
        return (
            f"{pandas}.dt.year * 12 + {pandas}.dt.month, or convert them to dates with "
            ".dt.to_timestamp()"
        )
    if "duration" in found or "interval" in found:
        return f"seconds (pandas: {pandas}.dt.total_seconds(); polars: {polars}.dt.total_seconds())"
    if re.match(r"time(32|64)?(\[|$)", found):
        return f"the hour (pandas: {pandas}.map(lambda t: t.hour); polars: {polars}.dt.hour())"
    return (
        f"days since the first date (pandas: t = pd.to_datetime({pandas}), (t - t.min()).dt.days; "
        f"polars: ({polars} - {polars}.min()).dt.total_days()), or the month or weekday"
    )


def _suggest_in_spark(column: str, date: str | None, time: str | None, _: str | None) -> str:
    """In the words of PySpark or of dplyr."""
    if date is None and time is None:
        return (
            "seconds or months between its ends: the difference of their unix_timestamp(), or "
            "months_between() of them"
        )
    begin = "F.unix_timestamp(F.lit('2020-01-01'), 'yyyy-MM-dd')"
    days = f"(F.unix_timestamp('{column}') - {begin}) / 86400"
    if spoken() == "R":
        begin = 'unix_timestamp("2020-01-01", "yyyy-MM-dd")'
        days = f"(unix_timestamp({column}) - {begin}) / 86400"
    if date:
        start = 'to_date("2020-01-01")'
        days = f"datediff({column}, {start})"
        days = either(f"F.datediff('{column}', F.lit('2020-01-01'))", days)
    made = either(f"df.withColumn('{column}', {days})", f"mutate(data, {column} = {days})")
    return f"days since a day, {made}, or the month or weekday, month() and dayofweek()"


def _check_known(column: str, kinds: Mapping[str, Any], name: str, why: str = "") -> None:
    if column not in kinds:
        near = difflib.get_close_matches(column, kinds, 1)
        advice = f"did you mean {show(near[0])}? Its" if near else "its"
        shown = ", ".join(islice(kinds, _SHOWN_COLUMNS)) + ", ..." * (len(kinds) > _SHOWN_COLUMNS)
        raise InputError(
            f"`{name}` has no column {show(column)}{why and f' ({why})'}: {advice} columns are "
            f"{shown}"
        )
