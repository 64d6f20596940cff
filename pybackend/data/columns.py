"""Which columns of a table make up which tensors, whatever kind of table it is.

A `ColumnGroup` becomes one tensor that a model is fed with: one column, or several side by side.
They are chosen from the columns' types alone, on the driver; `pybackend.data.arrow` makes the
tensors.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pybackend.errors import InputError
from pybackend.job.options import Promise

Names = str | Sequence[str]
TEXT = "str"
DEFAULT_LABEL = "label"
# What pandas, dask and Spark's pandas API write beside the user's columns.
_INDEX = re.compile(r"__index_level_\d+__|__null_dask_index__|__natural_order__")


@dataclass(frozen=True)
class ColumnSpec:
    """Which columns are used, and as what: arguments of `barrier_train` by the same names.

    With ``finds_levels`` False the codes of text are known already: its values must be among the
    ``categories``. ``known_from`` says in words what has fixed the types of the columns.
    """

    features: Any = None
    label: Any = DEFAULT_LABEL
    weight: str | None = None
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
    def named_columns(self) -> list[str]:
        """All columns that the arguments name."""
        groups = self.features.values() if isinstance(self.features, Mapping) else [self.features]
        names = [name for group in groups if group is not None for name in list_names(group)]
        return [*names, *self.label_columns, *([self.weight] if self.weight else [])]


@dataclass(frozen=True)
class ColumnKind:
    """What a column holds, by its table's schema.

    Attributes
    ----------
    holds
        ``"number"``, ``"binary"`` or ``"text"``; or, with a name for messages, something else.
    dtype
        Numpy's name of a number's type; None for those of any precision.
    depth
        How many arrays the values are nested in: 0 for one value per row.
    name
        The type as the table calls it.
    """

    holds: str
    dtype: str | None
    depth: int
    name: str


@dataclass(frozen=True)
class ColumnGroup:
    """One tensor: its place in the structure, and what it is made of.

    Attributes
    ----------
    key
        As in `pybackend.data.arrays`: ``x``, ``x/left``, ``y``, ``sample_weight``.
    columns, places
        Names, and positions in the Arrow batches, of the columns.
    dtype
        Of the tensor, `TEXT` for strings; None: as the columns are, side by side.
    shape
        Of a row, if `tensors` gives it; ``(None,)`` for rows of any length, padded.
    categories
        By column, the values that become their positions in this list.
    one_hot
        Those of them of which each value is a number of its own, 1 where a row has it, else 0.
    names
        Of the numbers of a row, in their order; None if a column holds bytes, text or arrays.
    is_flat
        One number per row gives shape ``()``, not ``(1,)``.
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
        """Whether this is a label or a weight, in which NaN has no meaning."""
        return not self.key.startswith("x")


@dataclass(frozen=True)
class TableRows:
    """Rows of a table, by the columns that are used of it.

    Attributes
    ----------
    column_groups
        The tensors that the columns become.
    spec
        What the user has asked for, with the categories of a text label added.
    left_out
        Columns that hold an index, which are no features unless they are named.
    """

    column_groups: tuple[ColumnGroup, ...]
    spec: ColumnSpec
    left_out: tuple[str, ...] = field(default=(), kw_only=True)

    @property
    def summary(self) -> dict[str, Any]:
        """What a `pybackend.api.result.TrainResult` says about the columns, by its names."""
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
        """What the numbers of each input are called, if each is one of a column."""
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
    """The columns that hold an index and that no argument names.

    Parameters
    ----------
    index
        Columns of which the table says so.
    """
    known = set(index)
    found = [column for column in columns if column in known or _INDEX.fullmatch(column)]
    return [column for column in found if column not in spec.named_columns]


def list_inputs(spec: ColumnSpec, columns: Iterable[str]) -> dict[str, list[str]]:
    """The feature columns by the keys of their tensors, of a table with these columns."""
    if spec.features is None:
        targets = list_groups("y", spec.label)
        used = {spec.weight, *(column for group in targets.values() for column in group)}
        return {"x": [column for column in columns if column not in used]}
    return list_groups("x", spec.features)


def list_groups(part: str, names: Any) -> dict[str, list[str]]:
    """The columns of a part of the data, by the keys of their tensors."""
    if names is None:
        return {}
    if isinstance(names, Mapping):
        return {f"{part}/{name}": list_names(columns) for name, columns in names.items()}
    return {part: list_names(names)}


def input_name(key: str) -> str:
    """The input that a key of a tensor names; empty for an only one."""
    return key.partition("/")[2]


def list_columns(column_groups: Sequence[ColumnGroup]) -> list[str]:
    """The user's names of the columns that groups read, in the order of their places."""
    names = {
        p: c for group in column_groups for p, c in zip(group.places, group.columns, strict=True)
    }
    return [names[place] for place in sorted(names)]


def check_column_spec(spec: ColumnSpec) -> None:
    """Check what can be checked of a spec without a table.

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
        raise InputError(f"`weight` must be the name of a column, not {spec.weight!r}")
    if spec.weight is not None and spec.label is None:
        raise InputError("`weight` weighs the loss of labels, but `label` is None: name the column")


def reject_duplicate_columns(columns: Sequence[str], name: str, ignores_case: bool = False) -> None:
    """Reject a table with two columns of one name: either could be meant."""
    seen: set[str] = set()
    for column in columns:
        known = column.lower() if ignores_case else column
        if known in seen:
            raise InputError(f"`{name}` has two columns {column!r}: rename one")
        seen.add(known)


def as_list(names: Any) -> Any:
    """Names that an index or an array holds, such as ``df.columns[:4]``, as a list."""
    if isinstance(names, Mapping):
        return {key: as_list(value) for key, value in names.items()}
    return names.tolist() if hasattr(names, "tolist") else names


def as_plain(values: Any) -> list[Any]:
    """Values of a column as Python's own numbers and text."""
    return [value.item() if hasattr(value, "item") else value for value in values]


def list_names(names: Names) -> list[str]:
    """Names given as one or as several."""
    return [names] if isinstance(names, str) else list(names)


def _check_names(argument: str, value: Any, single: bool) -> None:
    groups: dict[Any, Any] = dict(value) if isinstance(value, Mapping) else {None: value}
    expected = "the name of a column" if single else "names of columns"
    for key, names in groups.items():
        is_list = isinstance(names, (list, tuple)) and all(isinstance(n, str) for n in names)
        if not isinstance(names, str) and (single or not is_list or not names):
            raise InputError(f"`{argument}` must be {expected}, not {value!r}")
        if is_list and (twice := next((n for n in names if names.count(n) > 1), None)):
            raise InputError(f"`{argument}` names the column {twice!r} twice")
        if key is not None and (not isinstance(key, str) or not key or "/" in key):
            raise InputError(f"`{argument}` has an entry named {key!r}: use names without '/'")
    if not groups:
        raise InputError(f"`{argument}` must be {expected}, not {value!r}")
