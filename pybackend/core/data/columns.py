"""Columns of a table and the tensors made from them, for all kinds of tables.

A `ColumnGroup` becomes one tensor of the model's input or labels: one column, or several side by
side. The driver builds the groups using only the columns' types; `arrow` makes the tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.job.storage_options import Promise
from pybackend.core.words import show

Names = str | Sequence[str]
TEXT = "str"
DEFAULT_LABEL = "label"
# How the names of a pandas MultiIndex become text.
JOINED_NAMES = "frame.columns = ['_'.join(map(str, name)) for name in frame.columns]"
# Index columns that pandas, dask and Spark's pandas API write next to the data.
_INDEX = re.compile(r"__index_level_\d+__|__null_dask_index__|__natural_order__")


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
        """The columns that hold labels."""
        return [column for group in list_groups("y", self.label).values() for column in group]

    @property
    def weight_columns(self) -> list[str]:
        """The columns that hold weights."""
        groups = list_groups("sample_weight", self.weight).values()
        return [column for group in groups for column in group]

    @property
    def named_columns(self) -> list[str]:
        """All columns that the arguments name."""
        groups = self.features.values() if isinstance(self.features, Mapping) else [self.features]
        names = [name for group in groups if group is not None for name in list_names(group)]
        return [*names, *self.label_columns, *self.weight_columns]


@dataclass(frozen=True)
class ColumnKind:
    """Kind of a column's values, according to its table's schema.

    Attributes
    ----------
    holds
        ``"number"``, ``"binary"``, ``"text"`` or ``"other"``.
    dtype
        numpy's name for a number's type; None for other kinds.
    depth
        Number of arrays that the values are nested in: 0 for one value per row.
    name
        The table's name for the type.
    """

    holds: str
    dtype: str | None
    depth: int
    name: str


@dataclass(frozen=True)
class ColumnGroup:
    """One tensor: its key in the structure of the data, and its columns.

    Attributes
    ----------
    key
        Name as in `pybackend.core.data.arrays`: ``x``, ``x/left``, ``y``, ``sample_weight``.
    columns, places
        Names of the columns, and their positions in the Arrow batches.
    dtype
        Type of the tensor, `TEXT` for strings; None: not chosen yet.
    shape
        Shape of a row, if `tensors` gives it; None as its first size: any length, padded.
    categories
        Values of each encoded column; a value's code is its position.
    one_hot
        Columns of ``categories`` that are one-hot encoded.
    names
        Names of the numbers in a row, in order; None if a column holds bytes, text or arrays.
    is_flat
        Whether a row of one number has shape ``()``, not ``(1,)``.
    """

    key: str
    columns: tuple[str, ...]
    places: tuple[int, ...]
    dtype: str | None
    shape: tuple[int | None, ...] | None = None
    categories: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    one_hot: tuple[str, ...] = ()
    names: tuple[str, ...] | None = None
    is_flat: bool = False

    @property
    def is_target(self) -> bool:
        """True if this is a label or a weight, in which NaN is not allowed."""
        return not self.key.startswith("x")


@dataclass(frozen=True)
class TableRows:
    """Rows of a table, and the columns that are used.

    Attributes
    ----------
    column_groups
        The tensors that the columns become.
    spec
        The user's arguments, with the categories found in the data.
    left_out
        Index columns, which are features only if they are named.
    """

    column_groups: tuple[ColumnGroup, ...]
    spec: ColumnSpec
    left_out: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def summary(self) -> dict[str, Any]:
        """Fields of `pybackend.core.api.result.TrainResult` that describe the columns."""
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
    """Return the index columns that no argument names.

    Parameters
    ----------
    index
        Columns that the table marks as an index.
    """
    known = set(index)
    found = [column for column in columns if column in known or _INDEX.fullmatch(column)]
    return [column for column in found if column not in spec.named_columns]


def list_inputs(spec: ColumnSpec, columns: Iterable[str]) -> dict[str, list[str]]:
    """Return the feature columns of a table with these columns, by tensor key."""
    if spec.features is None:
        used = {*spec.label_columns, *spec.weight_columns}
        return {"x": [column for column in columns if column not in used]}
    return list_groups("x", spec.features)


def list_groups(part: str, names: Any) -> dict[str, list[str]]:
    """Return the columns of one part of the data, by tensor key."""
    if names is None:
        return {}
    if isinstance(names, Mapping):
        return {f"{part}/{name}": list_names(columns) for name, columns in names.items()}
    return {part: list_names(names)}


def input_name(key: str) -> str:
    """Return the input's name in a tensor's key; empty for a single input."""
    return key.partition("/")[2]


def list_columns(column_groups: Sequence[ColumnGroup]) -> list[str]:
    """Return the names of the columns that groups read, in the order of ``places``."""
    names = {
        p: c for group in column_groups for p, c in zip(group.places, group.columns, strict=True)
    }
    return [names[place] for place in sorted(names)]


def check_column_spec(spec: ColumnSpec) -> None:
    """Check the arguments that can be checked without a table.

    Raises
    ------
    InputError
        Names the argument.
    """
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
    """Reject a table with two columns of the same name."""
    seen: set[str] = set()
    for column in columns:
        known = column.lower() if ignores_case else column
        if known in seen:
            raise InputError(f"`{name}` has two columns named {show(column)}: rename one")
        seen.add(known)


def as_list(names: Any) -> Any:
    """Convert names in an index or an array, such as ``df.columns[:4]``, to a list."""
    if isinstance(names, Mapping):
        return {key: as_list(value) for key, value in names.items()}
    return names.tolist() if hasattr(names, "tolist") else names


def as_plain(values: Any) -> list[Any]:
    """Convert values of a column to Python's own numbers and text."""
    return [value.item() if hasattr(value, "item") else value for value in values]


def list_names(names: Names) -> list[str]:
    """Convert one name or several to a list."""
    return [names] if isinstance(names, str) else list(names)


def _check_names(argument: str, value: Any, single: bool) -> None:
    groups: dict[Any, Any] = dict(value) if isinstance(value, Mapping) else {None: value}
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
    if not groups:
        raise InputError(f"`{argument}` must be {expected}, not {show(value)}")
