"""Columns of a table, the tensors made from them, and the codes of their categories.

A `ColumnGroup` becomes one tensor of the model's input or labels: one column, or several side by
side. The driver builds the groups using only the columns' types; `arrow` makes the tensors. The
code of a value, 0, 1, 2, ..., is its index in the column's list of categories, which is determined
here if the user gives none. One-hot columns have a number per category.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.job.storage_options import Promise
from pybackend.core.words import REST, call_of, show

Names = str | Sequence[str]
TEXT = "str"
DEFAULT_LABEL = "label"
# How the names of a pandas MultiIndex become text.
JOINED_NAMES = "frame.columns = ['_'.join(map(str, name)) for name in frame.columns]"
# Index columns that pandas, dask and Spark's pandas API write next to the data.
_INDEX = re.compile(r"__index_level_\d+__|__null_dask_index__|__natural_order__")
ONE_HOT = "one_hot"
MOST_CATEGORIES = 10_000
# A column with more values is rather an identifier, and each value would be a number of every row.
MOST_ONE_HOT = 1_000
Distinct = Callable[[str], Iterable[Any]]
Kinds = Mapping[str, "ColumnKind"]


@dataclass(frozen=True)
class ColumnSpec:
    """Columns to use, and their roles: the arguments of `barrier_train` with the same names.

    If ``finds_levels`` is False, text is encoded with ``categories``, and other values raise an
    error. ``known_from`` is text for messages: the source that determines the columns' types.
    """

    features: Any = None
    label: Any = DEFAULT_LABEL
    weight: Any = None
    tensors: Mapping[str, Promise] | None = None
    categories: Mapping[str, Sequence[Any]] | None = None
    encode: str | Mapping[str, str] | None = None
    tfrecord_spec: Mapping[str, str] | None = None
    repartition: bool = True
    finds_levels: bool = True
    known_from: str | None = None

    @property
    def label_columns(self) -> list[str]:
        return [*chain(*columns_by_key("y", self.label).values())]

    @property
    def weight_columns(self) -> list[str]:
        return [*chain(*columns_by_key("sample_weight", self.weight).values())]

    @property
    def named_columns(self) -> list[str]:
        features = columns_by_key("x", self.features).values()
        return [*chain(*features), *self.label_columns, *self.weight_columns]


@dataclass(frozen=True)
class ColumnKind:
    """Kind of a column's values, according to its table's schema."""

    holds: str  # "number", "binary", "text" or "other"
    dtype: str | None  # numpy's name for a number's type; None for other kinds
    depth: int  # arrays that the values are nested in: 0 for one value per row
    name: str  # the table's name for the type


@dataclass(frozen=True)
class ColumnGroup:
    """One tensor: its key in the structure of the data, and its columns."""

    key: str  # as in `arrays`: x, x/left, y, sample_weight
    columns: tuple[str, ...]
    dtype: str | None  # of the tensor, `TEXT` for strings; None: not chosen yet
    # Of a row, if `tensors` gives it; None as its first size: any length, padded.
    shape: tuple[int | None, ...] | None = None
    # Values of each encoded column; a value's code is its index.
    categories: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    one_hot: tuple[str, ...] = ()  # those of `categories` that are one-hot encoded
    # Of the numbers in a row, in order; None if a column holds bytes, text or arrays.
    names: tuple[str, ...] | None = None
    is_flat: bool = False  # a row of one number has shape (), not (1,)

    @property
    def is_target(self) -> bool:
        """True for a label or a weight, in which NaN is not allowed."""
        return not self.key.startswith("x")


@dataclass(frozen=True)
class TableRows:
    """Rows of a table, and the columns that are used."""

    column_groups: tuple[ColumnGroup, ...]  # the tensors that the columns become
    spec: ColumnSpec  # the user's arguments, with the categories found in the data
    # Index columns, which are features only if they are named.
    left_out: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def summary(self) -> dict[str, Any]:
        """Fields of `pybackend.core.api.train_result.TrainResult` that describe the columns."""
        label, categories = self.spec.label, self.spec.categories or {}
        levels = categories.get(label) if isinstance(label, str) else None
        several = [] if isinstance(label, str) else self.spec.label_columns
        groups = {input_name(group.key): list(group.columns) for group in self._list_inputs()}
        names = self.feature_names
        return {
            "levels": None if levels is None else as_plain(levels),
            "features": groups.get("", groups),
            "tensors": self._select_inputs(self.spec.tensors),
            "categories": self._select_inputs(
                {name: as_plain(values) for name, values in categories.items()}, several
            ),
            "encode": self._select_inputs(self.spec.encode),
            "feature_names": names.get("", names) if any(names.values()) else None,
        }

    @property
    def feature_names(self) -> dict[str, list[str] | None]:
        """Names of each input's numbers; None for inputs of bytes, text or arrays."""
        return {
            input_name(group.key): None if group.names is None else list(group.names)
            for group in self._list_inputs()
        }

    def _select_inputs(self, given: Any, also: Sequence[str] = ()) -> dict[str, Any] | None:
        used = {column for group in self._list_inputs() for column in group.columns} | {*also}
        if not isinstance(given, Mapping):
            return None
        return {column: value for column, value in given.items() if column in used} or None

    def _list_inputs(self) -> list[ColumnGroup]:
        return [group for group in self.column_groups if not group.is_target]


def find_index(spec: ColumnSpec, columns: Iterable[str], index: Iterable[str] = ()) -> list[str]:
    """Return the index columns that no argument names; ``index``: those that the table marks."""
    known = set(index)
    found = [column for column in columns if column in known or _INDEX.fullmatch(column)]
    return [column for column in found if column not in spec.named_columns]


def list_inputs(spec: ColumnSpec, columns: Iterable[str]) -> dict[str, list[str]]:
    """Return the feature columns of a table with these columns, by tensor key."""
    if spec.features is None:
        used = {*spec.label_columns, *spec.weight_columns}
        return {"x": [column for column in columns if column not in used]}
    return columns_by_key("x", spec.features)


def columns_by_key(part: str, names: Any) -> dict[str, list[str]]:
    """Return the columns of one part of the data, by tensor key."""
    if names is None:
        return {}
    if isinstance(names, Mapping):
        return {f"{part}/{name}": list_names(columns) for name, columns in names.items()}
    return {part: list_names(names)}


def input_name(key: str) -> str:
    """Return the input's name in a tensor's key; empty for a single input."""
    return key.partition("/")[2]


def list_columns(groups: Sequence[ColumnGroup]) -> list[str]:
    """Return the columns that groups read, in their order in the Arrow batches."""
    return list(dict.fromkeys(chain(*(group.columns for group in groups))))


def check_column_spec(spec: ColumnSpec) -> None:
    """Check the arguments that can be checked without a table."""
    if spec.label is not None:
        _check_names("label", spec.label, single=True)
    if spec.features is not None:
        _check_names("features", spec.features, single=False)
    if spec.weight is not None and not isinstance(spec.weight, str):
        raise InputError(f"`weight` must be the name of a column, not {show(spec.weight)}")
    if spec.weight is not None and spec.label is None:
        raise InputError(
            f"`weight` weights the loss on the labels, but `label` is {show(None)}: specify the "
            "label column"
        )


def reject_duplicate_columns(columns: Sequence[str], name: str, ignores_case: bool = False) -> None:
    known = [column.lower() if ignores_case else column for column in columns]
    if len({*known}) < len(known):
        twice = next(column for n, column in enumerate(columns) if known[n] in known[:n])
        raise InputError(f"`{name}` has two columns named {show(twice)}: rename one")


def as_list(names: Any) -> Any:
    """Convert names in an index or an array, such as ``df.columns[:4]``, to a list."""
    if isinstance(names, Mapping):
        return {key: as_list(value) for key, value in names.items()}
    return names.tolist() if hasattr(names, "tolist") else names


def as_plain(values: Any) -> list[Any]:
    """To Python's own numbers and text."""
    return [value.item() if hasattr(value, "item") else value for value in values]


def list_names(names: Names) -> list[str]:
    return [names] if isinstance(names, str) else list(names)


def _check_names(argument: str, value: Any, single: bool) -> None:
    groups: dict[Any, Any] = {None: value}
    if isinstance(value, Mapping) and value:
        groups = dict(value)
    expected = "the name of a column" if single else "names of columns"
    for key, names in groups.items():
        is_list = isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names)
        if not isinstance(names, str) and (single or not is_list or not names):
            given = names if isinstance(names, list) else [names]
            is_multi = any(isinstance(name, tuple) for name in given)
            cure = f": join the names of a MultiIndex, e.g. {JOINED_NAMES}" if is_multi else ""
            raise InputError(f"`{argument}` must be {expected}, not {show(value)}{cure}")
        if is_list and (twice := next((n for n in names if names.count(n) > 1), None)):
            raise InputError(f"`{argument}` lists the column {show(twice)} twice")
        if key is not None and (not isinstance(key, str) or not key or "/" in key):
            raise InputError(f"`{argument}` has an entry named {show(key)}: use names without '/'")


def find_categories(spec: ColumnSpec, kinds: Kinds, distinct: Distinct) -> ColumnSpec:
    """Add the categories of text labels, and of features that are encoded.

    ``distinct`` is called with a column whose categories the user did not name, and returns its
    values. An `InputError` names the column: it cannot be encoded, has too many values, or needs
    the categories of an earlier training run, which were not given.
    """
    categories = dict(spec.categories or {})
    for label in spec.label_columns:
        kind = kinds.get(label)
        if kind is None or kind.holds != "text" or kind.depth or label in categories:
            continue
        what = f"the label column {show(label)}"
        categories[label] = _find_values(what, label, spec, distinct)
        if len(categories[label]) > MOST_CATEGORIES:
            raise InputError(
                f"{what} has more than {MOST_CATEGORIES:,} distinct strings: it is not a label"
            )
    encode = _choose_encodings(spec, kinds)
    for column, encoding in encode.items():
        if column not in categories:
            categories[column] = _find_values(f"column {show(column)}", column, spec, distinct)
            check_count(column, categories[column], encoding)
    return replace(spec, categories=categories or None, encode=encode or None)


def keep_categories(
    spec: ColumnSpec, kinds: Kinds, find: Callable[[str], Sequence[Any] | None]
) -> ColumnSpec:
    """Add the categories that a table defines for its columns, in order.

    Columns for which the arguments specify something else are unchanged. A column that shares an
    input with others is one-hot encoded, like text. A single column becomes codes, but a single
    text column remains text. ``find`` returns the categories of a column, None or empty if it has
    none; it is called only for columns whose categories are used.
    """
    if not spec.finds_levels or spec.known_from is not None:
        return spec
    categories, encode = dict(spec.categories or {}), spec.encode
    for column in spec.label_columns:
        if column in kinds and column not in categories and (found := find(column)):
            categories[column] = as_plain(found)
    for group in list_inputs(spec, kinds).values():
        for column in group:
            is_said = column in categories or column in (spec.tensors or {})
            stays_text = len(group) == 1 and column in kinds and kinds[column].holds == "text"
            if column not in kinds or is_said or stays_text or not (found := find(column)):
                continue
            categories[column] = as_plain(found)
            if not isinstance(encode, str):
                usual = ONE_HOT if len(group) > 1 else "integer"
                encode = {**(encode or {}), column: (encode or {}).get(column, usual)}
            encoding = encoding_of(replace(spec, encode=encode), column)
            check_count(column, categories[column], encoding)
    return replace(spec, categories=categories or None, encode=encode)


def check_count(column: str, values: Sequence[Any], encoding: str) -> None:
    most, advice = MOST_CATEGORIES, "make it a separate input for a StringLookup or Hashing layer"
    if encoding == ONE_HOT:
        codes = call_of("DataOptions", encode={column: "integer"})
        most, advice = MOST_ONE_HOT, f"use {codes} and an Embedding layer"
    if len(values) > most:
        raise InputError(
            f"column {show(column)} has more than {most:,} values, too many to encode as "
            f"{show(encoding)}: leave it out of `features`, or {advice}"
        )


def _choose_encodings(spec: ColumnSpec, kinds: Kinds) -> dict[str, str]:
    """Return the encoding of each encoded feature column: ``"one_hot"`` or ``"integer"``.

    Text in an input of several columns is one-hot encoded, unless `encode` specifies otherwise. A
    text column that is an input on its own remains text. Columns with `categories` become codes.
    """
    chosen = {
        column: _choose_encoding(spec, column, kinds.get(column), len(columns) == 1)
        for columns in list_inputs(spec, kinds).values()
        for column in columns
    }
    for column in spec.encode if isinstance(spec.encode, Mapping) else ():
        if column not in chosen:
            raise InputError(f"`encode` has {show(column)}, which is not one of the features")
    return {column: encoding for column, encoding in chosen.items() if encoding is not None}


def encoding_of(spec: ColumnSpec, column: str) -> str:
    if isinstance(spec.encode, Mapping):
        return spec.encode.get(column, "integer")
    return spec.encode or "integer"


def expand_names(column: str, categories: Iterable[Any]) -> list[str]:
    """Name the numbers of a one-hot column, in order: ``column_value``."""
    return [f"{column}_{value}" for value in categories]


def _choose_encoding(
    spec: ColumnSpec, column: str, kind: ColumnKind | None, is_alone: bool
) -> str | None:
    if kind is None:  # `group_columns` reports it, with the existing columns
        return None
    is_text = kind.holds == "text" and not kind.depth
    has_categories = column in (spec.categories or {})
    if isinstance(spec.encode, Mapping):
        asked = spec.encode.get(column)
    else:
        asked = spec.encode if is_text or has_categories else None
    if asked is not None and not has_categories:
        is_whole = kind.holds == "number" and (kind.dtype or "float")[:3] in ("int", "uin")
        if kind.depth or not (is_text or is_whole):
            raise InputError(
                f"`encode` has {show(column)}, which has type {kind.name}: expected text or whole "
                "numbers; for other types, list the values in `categories`"
            )
    if asked is None and has_categories:
        return "integer"
    if asked is None and is_text and not is_alone:
        return ONE_HOT
    return asked


def _find_values(what: str, column: str, spec: ColumnSpec, distinct: Distinct) -> list[Any]:
    if spec.known_from is not None:
        raise InputError(f"{what} contains text, but numbers in {spec.known_from}")
    if not spec.finds_levels:
        raise InputError(
            f"{what} contains text, which needs the same codes as in training: list its values in "
            f"order, {call_of('DataOptions', categories={column: [REST]})}, or "
            "pass the training result as the model"
        )
    values = sorted(value for value in distinct(column) if value is not None)
    if not values:
        raise InputError(f"{what} has no values to encode: the data has no rows, or only nulls")
    return values
