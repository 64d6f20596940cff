"""Convert Arrow batches to tensors, one per column group; errors name the column and a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pybackend.core.data.arrays import Array, Ragged, narrow, pack_lists, to_offsets
from pybackend.core.data.columns import TEXT, ColumnGroup, ColumnKind, list_columns
from pybackend.core.errors import InputError
from pybackend.core.words import Code, setting, show

Tensors = dict[str, Array | Ragged]
_SHOWN_COLUMNS = 6
_SHOWN_CHARACTERS = 40
_SHOWN_WIDTHS = 5


def describe_schema(schema: Any) -> dict[str, ColumnKind]:
    return {field.name: _describe_type(field.type) for field in schema}


def _describe_type(kind: Any) -> ColumnKind:
    import pyarrow as pa

    depth, inner = 0, kind
    while isinstance(inner, _list_types()):
        depth, inner = depth + 1, inner.value_type
    if isinstance(inner, pa.DictionaryType):
        inner = inner.value_type
    if pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner):
        return ColumnKind("number", inner.to_pandas_dtype()().dtype.name, depth, str(kind))
    if pa.types.is_decimal(inner):
        return ColumnKind("number", "float64", depth, str(kind))
    if pa.types.is_string(inner) or pa.types.is_large_string(inner) or _is_view(inner, "string"):
        return ColumnKind("text", None, depth, str(kind))
    return ColumnKind("binary" if _is_bytes(inner) else "other", None, depth, str(kind))


def _list_types() -> tuple[Any, ...]:
    import pyarrow as pa

    names = ("ListType", "LargeListType", "FixedSizeListType", "ListViewType", "LargeListViewType")
    return tuple(getattr(pa, name) for name in names if hasattr(pa, name))


def _is_view(kind: Any, of: str) -> bool:
    """Old versions of Arrow have no views."""
    import pyarrow as pa

    check = getattr(pa.types, f"is_{of}_view", None)
    return bool(check is not None and check(kind))


def drop_views(column: Any) -> Any:
    """Convert views of text, bytes or lists in a column (array or chunked) to plain types.

    polars and DuckDB write views, which few of Arrow's functions support.
    """
    import pyarrow as pa

    if not has_views(column.type):
        return column
    if isinstance(column, pa.ChunkedArray):
        chunks = column.chunks or [pa.array([], column.type)]
        return pa.chunked_array([drop_views(chunk) for chunk in chunks])
    if isinstance(column.type, pa.DictionaryType):
        return pa.DictionaryArray.from_arrays(
            column.indices, drop_views(column.dictionary), ordered=column.type.ordered
        )
    if not hasattr(column.type, "value_type"):
        is_text = _is_view(column.type, "string")
        return column.cast(pa.large_string() if is_text else pa.large_binary())
    import pyarrow.compute as pc

    sizes = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    offsets = pa.array(to_offsets(sizes))
    mask = column.is_null() if column.null_count else None
    return pa.LargeListArray.from_arrays(offsets, drop_views(column.flatten()), mask=mask)


def has_views(kind: Any) -> bool:
    """Also inside lists and dictionaries."""
    is_list = type(kind).__name__ in ("ListViewType", "LargeListViewType")
    inner = getattr(kind, "value_type", None)
    is_view = is_list or _is_view(kind, "string") or _is_view(kind, "binary")
    return is_view or (inner is not None and has_views(inner))


class TensorReader:
    """Converter of batches to tensors; all rows of a column must be as long as the first ones.

    An `InputError` names the column and the row that holds a null, a NaN label, an unknown
    category, or a value of a different size.
    """

    def __init__(self, column_groups: Sequence[ColumnGroup]) -> None:
        self._groups = column_groups
        self._indices = {name: n for n, name in enumerate(list_columns(column_groups))}
        self._widths: dict[str, int] = {}
        self._inner: dict[str, list[int]] = {}
        self._batch: Any = None
        self._name_row: Callable[[int], str] = str

    def read(self, batch: Any, name_row: Callable[[int], str] | None = None) -> Tensors:
        """Return the tensors of a batch, by column group key.

        ``name_row`` receives a row's number in the batch, and returns its name for errors. None
        (default): errors show the row's values.
        """
        self._batch = batch
        self._name_row = name_row or self._describe_row
        return {group.key: self._read_tensor(group) for group in self._groups}

    def find_complete(self, batch: Any) -> Array:
        """Return whether each row of a batch has a value in every column.

        Null, NaN, infinite numbers and unknown categories do not count as values.
        """
        found = np.ones(batch.num_rows, bool)
        for group in self._groups:
            for name in group.columns:
                column = batch.column(self._indices[name])
                found &= _find_complete(column, name, group.categories.get(name))
        return found

    def _describe_row(self, row: int) -> str:
        """Describe a row by its values, for tables without row numbers."""
        names, shown = list(self._indices), []
        for index, name in enumerate(names[:_SHOWN_COLUMNS]):
            text = repr(self._batch.column(index)[row].as_py())
            is_long = len(text) > _SHOWN_CHARACTERS
            shown.append(f"{name}={text[: _SHOWN_CHARACTERS - 3] + '...' if is_long else text}")
        more = ", ..." if len(names) > _SHOWN_COLUMNS else ""
        return f"the row ({', '.join(shown)}{more})"

    def _read_tensor(self, group: ColumnGroup) -> Array | Ragged:
        columns = [
            require_values(self._batch.column(self._indices[name]), name, self._name_row)
            for name in group.columns
        ]
        if group.dtype == TEXT:
            return self._read_texts(columns[0], group.columns[0])
        if group.shape and group.shape[0] is None:
            return self._read_ragged(columns[0], group)
        parts = [
            self._cast(self._read_matrix(column, name, group), name, group, int)
            for column, name in zip(columns, group.columns, strict=True)
        ]
        found = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        if group.shape is not None:
            return found.reshape(len(found), *group.shape)
        return found.reshape(-1) if group.is_flat else found

    def _read_texts(self, column: Any, name: str) -> Ragged:
        if not hasattr(column.type, "value_type"):
            return _read_strings(column)
        sizes = measure_lists(column)
        return pack_lists(_read_strings(self._flatten_lists(column, name, sizes)), sizes)

    def _read_matrix(self, column: Any, name: str, group: ColumnGroup) -> Array:
        """Return a column's numbers, of shape (rows, width)."""
        if name in group.categories:
            codes = self._encode_categories(column, name, group.categories[name])
            if name not in group.one_hot:
                return codes
            is_value: Array = codes == np.arange(len(group.categories[name]))
            return is_value.astype(np.int8)
        promised = None if group.shape is None else int(np.prod(group.shape))  # type: ignore[arg-type]
        if _is_bytes(column.type):
            return self._read_bytes(column, name, group.dtype if promised else "uint8", promised)
        values, levels, row_sizes = self._unnest(column, name)
        numbers = _read_numbers(values)
        if row_sizes is None:
            if promised not in (None, 1):
                raise InputError(f"column {show(name)} has one number per row, not {group.shape}")
            return numbers.reshape(-1, 1)
        inner = [sizes for sizes in levels[1:] if sizes.size]
        if promised is None and (uneven := [sizes for sizes in inner if np.ptp(sizes)]):
            raise InputError(_explain_widths(name, uneven[0], "one width"))
        widths = [int(sizes[0]) for sizes in inner]
        self._check_widths(row_sizes, name, promised, widths)
        known = self._inner.setdefault(name, widths)
        if promised is None and widths and widths != known:
            raise InputError(_explain_widths(name, np.array([*known, *widths]), "one width"))
        return numbers.reshape(len(column), -1)

    def _read_bytes(self, column: Any, name: str, dtype: Any, promised: int | None) -> Array:
        import pyarrow as pa

        content, offsets = get_bytes(column.cast(pa.large_binary()))
        size = None if promised is None else promised * np.dtype(dtype).itemsize
        self._check_widths(np.diff(offsets), name, size, None)
        return content.reshape(len(column), -1).view(dtype)

    def _unnest(self, column: Any, name: str) -> tuple[Any, list[Array], Array | None]:
        """Return nested lists' values, the lengths of each level's lists, and those of rows."""
        values, levels, row_sizes = column, list[Array](), None
        while hasattr(values.type, "value_type"):
            levels.append(measure_lists(values))
            ends = to_offsets(levels[-1])
            row_sizes = levels[-1] if row_sizes is None else np.diff(ends[to_offsets(row_sizes)])
            values = self._flatten_lists(values, name, row_sizes)
        return values, levels, row_sizes

    def _check_widths(
        self, sizes: Array, name: str, promised: int | None, inner: list[int] | None
    ) -> None:
        """Check the numbers in each row; ``inner``: lengths of inner lists, None for bytes."""
        known = self._widths.setdefault(name, int(sizes[0]) if promised is None else promised)
        if (wrong := np.flatnonzero(sizes != known)).size:
            row = int(wrong[0])
            expected = "as in `tensors`" if promised is not None else "as in earlier rows"
            what, advice = "bytes", "Make them equally long, or convert them to arrays of numbers"
            if inner is not None:
                given = setting(tensors={name: (Code("dtype"), (None, *inner))})
                what, advice = "numbers", f"For rows of varying length, pass {given}"
            raise InputError(
                f"column {show(name)} has {int(sizes[row])} {what} in {self._name_row(row)}; "
                f"expected {known}, {expected}. {advice}"
            )

    def _read_ragged(self, column: Any, group: ColumnGroup) -> Ragged:
        assert group.shape is not None
        name, inner = group.columns[0], [size or 1 for size in group.shape[1:]]  # none is None
        values, levels, row_sizes = self._unnest(column, name)
        if row_sizes is None:
            raise InputError(f"column {show(name)} has one number per row, not {show(group.shape)}")
        for sizes, size in zip(levels[1:], inner, strict=False):
            if (sizes != size).any():
                raise InputError(_explain_widths(name, sizes, f"{size}, as in `tensors`"))
        size = math.prod(inner)
        if (row_sizes % size).any():
            row = int(np.flatnonzero(row_sizes % size)[0])
            raise InputError(
                f"column {show(name)} has {int(row_sizes[row])} numbers in {self._name_row(row)}; "
                f"expected a multiple of {size}, because of its shape {show(group.shape)} in "
                "`tensors`"
            )
        offsets = to_offsets(row_sizes // size)
        numbers = _read_numbers(values).reshape(-1, *inner)

        def row_of(element: int) -> int:
            return int(np.searchsorted(offsets, element, side="right")) - 1

        return Ragged(self._cast(numbers, name, group, row_of), offsets)

    def _cast(
        self, numbers: Array, name: str, group: ColumnGroup, row_of: Callable[[int], int]
    ) -> Array:
        """Convert numbers to the tensor's type, in this machine's byte order.

        Numbers that do not fit raise an error, and so does NaN in a label or a weight. ``row_of``
        returns the row of an element.
        """
        if group.is_target and numbers.dtype.kind == "f" and np.isnan(numbers).any():
            what = "weight" if group.key.startswith("sample_weight") else "label"
            row = row_of(int(np.argwhere(np.isnan(numbers))[0][0]))
            raise InputError(
                f"the {what} column {show(name)} contains NaN in {self._name_row(row)}: drop or "
                "fill those rows first"
            )
        wanted = np.dtype(group.dtype).newbyteorder("=")
        if numbers.dtype == wanted or not numbers.size:
            return numbers.astype(wanted, copy=False)
        if wanted.kind == "f" and numbers.dtype.kind == "f":
            return narrow(
                numbers, wanted, lambda row: f"column {show(name)} in {self._name_row(row_of(row))}"
            )
        with np.errstate(invalid="ignore"):
            cast = numbers.astype(wanted)
        if wanted.kind in "iu" and numbers.dtype.kind in "fiu":
            changed = (cast != numbers).reshape(len(numbers), -1).any(axis=1)
            if changed.any():
                row = row_of(int(np.flatnonzero(changed)[0]))
                raise InputError(
                    f"column {show(name)} has numbers that do not fit in {wanted.name} in "
                    f"{self._name_row(row)}"
                )
        return cast

    def _flatten_lists(self, lists: Any, name: str, row_sizes: Array) -> Any:
        """``row_sizes`` is the number of elements in each row of the batch."""

        def name_row(element: int) -> str:
            return self._name_row(int(np.searchsorted(np.cumsum(row_sizes), element, side="right")))

        return require_values(lists.flatten(), name, name_row)

    def _encode_categories(self, column: Any, name: str, categories: Sequence[Any]) -> Array:
        codes = _look_up(column, name, categories)
        if codes.null_count:
            row = int(np.flatnonzero(codes.is_null().to_numpy(zero_copy_only=False))[0])
            listed = ", ".join(map(repr, categories[:10])) + (", ..." * (len(categories) > 10))
            raise InputError(
                f"column {show(name)} contains {show(column[row].as_py())} in "
                f"{self._name_row(row)}, which is not one of its categories ({listed})"
            )
        return np.asarray(codes.to_numpy(zero_copy_only=False)).reshape(-1, 1)


def _explain_widths(name: str, sizes: Array, expected: str) -> str:
    widths = np.unique(sizes)
    found, more = widths[:_SHOWN_WIDTHS], len(widths) > _SHOWN_WIDTHS
    joined = setting(tensors={name: (Code("dtype"), (None,))})
    return (
        f"the inner arrays of column {show(name)} have {', '.join(map(str, found))}"
        f"{', ...' * more} numbers; expected {expected}. Pad them to one width, or join those of "
        f"each row (Spark: flatten()) and pass {joined}"
    )


def _look_up(column: Any, name: str, categories: Sequence[Any]) -> Any:
    """Return the index of each value among a column's categories; null for other values."""
    import pyarrow as pa
    import pyarrow.compute as pc

    try:
        known = pa.array(categories).cast(column.type)
    except pa.ArrowException as error:
        raise InputError(
            f"column {show(name)} has type {column.type}, which cannot represent its categories "
            f"{', '.join(map(show, categories[:10]))} (from training or `categories`): cast it to "
            "their type"
        ) from error
    return pc.index_in(column, value_set=known)


def find_known(column: Any, name: str, categories: Sequence[Any]) -> Array:
    known: Array = _look_up(_decode(column), name, categories).is_valid()
    return np.asarray(known)


def _find_complete(column: Any, name: str, categories: Sequence[Any] | None) -> Array:
    import pyarrow as pa
    import pyarrow.compute as pc

    column = _decode(column)
    if categories is None and _is_complete(column):  # at a fraction of the cost
        return np.ones(len(column), bool)
    has_value = pc.is_valid(column)
    if pa.types.is_floating(column.type):
        has_value = pc.fill_null(pc.is_finite(column), False)
    found: Array = has_value.to_numpy(zero_copy_only=False)
    if categories is not None:
        return found & find_known(column, name, categories)
    if hasattr(column.type, "value_type"):
        inner = _find_complete(pc.list_flatten(column), name, None)
        if not inner.all():
            found[pc.list_parent_indices(column).to_numpy(zero_copy_only=False)[~inner]] = False
    return found


def _is_complete(column: Any) -> bool:
    """True if a column has only finite numbers and no nulls, also within lists."""
    import pyarrow as pa

    if column.null_count:
        return False
    if hasattr(column.type, "value_type"):
        return _is_complete(column.flatten())
    if len(column) and pa.types.is_floating(column.type):
        numbers = column.to_numpy(zero_copy_only=False)
        return bool(np.isfinite(numbers.min()) and np.isfinite(numbers.max()))
    return True


def _decode(column: Any) -> Any:
    return column.dictionary_decode() if hasattr(column, "dictionary_decode") else column


def require_values(column: Any, name: str, name_row: Callable[[int], str]) -> Any:
    """Return a column without its dictionary encoding; raise an error if it has nulls."""
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        raise InputError(
            f"column {show(name)} has {column.null_count} null(s), first in {name_row(row)}: drop "
            "or fill those rows first"
        )
    return _decode(column)


def _read_strings(column: Any) -> Ragged:
    import pyarrow as pa

    return Ragged(*get_bytes(column.cast(pa.large_string()).cast(pa.large_binary())), is_text=True)


def get_bytes(wide: Any) -> tuple[Array, Array]:
    """Return the consecutive bytes of a column of large_binary, and each row's start; no copy."""
    _, starts, content = wide.buffers()
    # Arrow may leave out the buffers of a column without rows.
    offsets = np.zeros(1, np.int64)
    if len(wide):
        offsets = np.frombuffer(starts, np.int64)[wide.offset : wide.offset + len(wide) + 1]
    return np.frombuffer(content or b"", np.uint8)[offsets[0] : offsets[-1]], offsets - offsets[0]


def measure_lists(lists: Any) -> Array:
    """Return the number of elements in lists, which contain no nulls."""
    width = getattr(lists.type, "list_size", None)
    if width is not None:
        return np.full(len(lists), width, np.int64)
    sizes: Array = np.diff(lists.offsets.to_numpy()).astype(np.int64)
    return sizes


def _read_numbers(values: Any) -> Array:
    import pyarrow as pa

    if pa.types.is_decimal(values.type):
        values = values.cast(pa.float64())
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    is_variable = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return bool(is_variable or pa.types.is_fixed_size_binary(kind))
