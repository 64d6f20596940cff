"""Encode the values of a column as numbers: as codes 0, 1, 2, ..., or one-hot.

Codes are positions in the column's list of categories, which is determined here if the user gives
none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pybackend.core.data.columns import ColumnKind, ColumnSpec, as_plain, list_inputs
from pybackend.core.errors import InputError
from pybackend.core.words import REST, call_of, show

ONE_HOT = "one_hot"
MOST_CATEGORIES = 10_000
# A column with more values is rather an identifier, and each value would be a number of every row.
MOST_ONE_HOT = 1_000

Distinct = Callable[[str], Iterable[Any]]


def find_categories(
    spec: ColumnSpec, kinds: Mapping[str, ColumnKind], distinct: Distinct
) -> ColumnSpec:
    """Add the categories of text labels, and of features that are encoded.

    Parameters
    ----------
    distinct
        Called with a column whose categories the user did not name; returns its values.

    Raises
    ------
    InputError
        Names the column: it cannot be encoded, has too many values, or needs the categories of an
        earlier training run, which were not given.
    """
    spec = _add_label_categories(spec, kinds, distinct)
    encode = choose_encodings(spec, kinds)
    categories = dict(spec.categories or {})
    for column, encoding in encode.items():
        if column in categories:
            continue
        if not spec.finds_levels or spec.known_from is not None:
            raise InputError(_explain_missing(f"column {show(column)}", column, spec))
        values = _sort_values(distinct(column))
        check_count(column, values, encoding)
        if not values:
            raise InputError(_explain_empty(f"column {show(column)}"))
        categories[column] = values
    return replace(spec, categories=categories or None, encode=encode or None)


def keep_categories(
    spec: ColumnSpec, kinds: Mapping[str, ColumnKind], find: Callable[[str], Sequence[Any] | None]
) -> ColumnSpec:
    """Add the categories that a table defines for its columns, in order.

    Columns for which the arguments specify something else are unchanged. A column that shares an
    input with others is one-hot encoded, like text. A single column becomes codes, but a single
    text column remains text.

    Parameters
    ----------
    find
        Returns the categories of a column; None or empty if it has none. Called only for columns
        whose categories are used.
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
    """Raise an error if a feature has too many values to encode."""
    most = MOST_ONE_HOT if encoding == ONE_HOT else MOST_CATEGORIES
    if len(values) > most:
        raise InputError(
            f"column {show(column)} has more than {most:,} values, too many to encode as "
            f"{show(encoding)}: leave it out of `features`, or "
            + (
                f"use {call_of('DataOptions', encode={column: 'integer'})} and an Embedding layer"
                if encoding == ONE_HOT
                else "make it a separate input for a StringLookup or Hashing layer"
            )
        )


def choose_encodings(spec: ColumnSpec, kinds: Mapping[str, ColumnKind]) -> dict[str, str]:
    """Return the encoding of each encoded feature column: ``"one_hot"`` or ``"integer"``.

    Text in an input of several columns is one-hot encoded, unless `encode` specifies otherwise. A
    text column that is an input on its own remains text. Columns with `categories` become codes.
    """
    inputs = list_inputs(spec, kinds)
    features = [column for columns in inputs.values() for column in columns]
    if isinstance(spec.encode, Mapping):
        for column in spec.encode:
            if column not in features:
                raise InputError(f"`encode` has {show(column)}, which is not one of the features")
    chosen: dict[str, str] = {}
    for columns in inputs.values():
        for column in columns:
            encoding = _choose_encoding(spec, column, kinds.get(column), len(columns) == 1)
            if encoding is not None:
                chosen[column] = encoding
    return chosen


def encoding_of(spec: ColumnSpec, column: str) -> str:
    """Return the encoding of a feature column with categories."""
    if isinstance(spec.encode, Mapping):
        return spec.encode.get(column, "integer")
    return spec.encode or "integer"


def expand_names(column: str, categories: Iterable[Any]) -> list[str]:
    """Return the names of the numbers from a one-hot column, in order: ``column_value``."""
    return [f"{column}_{value}" for value in categories]


def _choose_encoding(
    spec: ColumnSpec, column: str, kind: ColumnKind | None, is_alone: bool
) -> str | None:
    if kind is None:  # `group_columns` reports it, with the existing columns
        return None
    is_text = kind.holds == "text" and not kind.depth
    has_categories = column in (spec.categories or {})
    asked = None
    if isinstance(spec.encode, Mapping):
        asked = spec.encode.get(column)
    elif is_text or has_categories:
        asked = spec.encode
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


def _add_label_categories(
    spec: ColumnSpec, kinds: Mapping[str, ColumnKind], distinct: Distinct
) -> ColumnSpec:
    categories = dict(spec.categories or {})
    for label in spec.label_columns:
        kind = kinds.get(label)
        if kind is None or kind.holds != "text" or kind.depth or label in categories:
            continue
        if not spec.finds_levels or spec.known_from is not None:
            raise InputError(_explain_missing(f"the label column {show(label)}", label, spec))
        values = _sort_values(distinct(label))
        if len(values) > MOST_CATEGORIES:
            raise InputError(
                f"the label column {show(label)} has more than {MOST_CATEGORIES:,} distinct "
                "strings: it is not a label"
            )
        if not values:
            raise InputError(_explain_empty(f"the label column {show(label)}"))
        categories[label] = values
    return replace(spec, categories=categories or None)


def _explain_missing(what: str, column: str, spec: ColumnSpec) -> str:
    if spec.known_from is not None:
        return f"{what} contains text, but numbers in {spec.known_from}"
    return (
        f"{what} contains text, which needs the same codes as in training: list its values in "
        f"order, {call_of('DataOptions', categories={column: [REST]})}, or "
        "pass the training result as the model"
    )


def _explain_empty(what: str) -> str:
    return (
        f"{what} has no values to encode: the data has no rows, or the column contains only nulls"
    )


def _sort_values(values: Iterable[Any]) -> list[Any]:
    return sorted(value for value in values if value is not None)
