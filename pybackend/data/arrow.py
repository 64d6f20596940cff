"""Tensors from Arrow batches, by column groups; errors name the column and a row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pybackend.data.columns import TEXT, ColumnGroup, ColumnKind, columns_to_read
from pybackend.data.spool import Ragged
from pybackend.errors import InputError

Array = npt.NDArray[Any]
Tensors = dict[str, Array | Ragged]
_SHOWN_COLUMNS = 6
_SHOWN_CHARACTERS = 40


def kinds_of_schema(schema: Any) -> dict[str, ColumnKind]:
    """What the columns of an Arrow schema hold."""
    return {field.name: _kind(field.type) for field in schema}


def _kind(kind: Any) -> ColumnKind:
    import pyarrow as pa

    depth, inner = 0, kind
    while isinstance(inner, (pa.ListType, pa.LargeListType, pa.FixedSizeListType)):
        depth, inner = depth + 1, inner.value_type
    if isinstance(inner, pa.DictionaryType):
        inner = inner.value_type
    if pa.types.is_integer(inner) or pa.types.is_floating(inner) or pa.types.is_boolean(inner):
        return ColumnKind("number", inner.to_pandas_dtype()().dtype.name, depth, str(kind))
    if pa.types.is_decimal(inner):
        return ColumnKind("number", "float64", depth, str(kind))
    if pa.types.is_string(inner) or pa.types.is_large_string(inner):
        return ColumnKind("text", None, depth, str(kind))
    is_binary = pa.types.is_binary(inner) or pa.types.is_large_binary(inner)
    if is_binary or pa.types.is_fixed_size_binary(inner):
        return ColumnKind("binary", None, depth, str(kind))
    return ColumnKind("other", None, depth, str(kind))


class TensorReader:
    """Makes the tensors of one batch after the other, and holds all rows to the first ones' sizes.

    Errors are `InputError`: they name the column, and a row, that holds a null, a NaN label, an
    unknown category, or a value of another size.
    """

    def __init__(self, column_groups: Sequence[ColumnGroup]) -> None:
        self._leaves = column_groups
        self._widths: dict[str, int] = {}
        self._batch: Any = None
        self._where: Callable[[int], str] = str

    def read(self, batch: Any, where: Callable[[int], str] | None = None) -> Tensors:
        """The tensors of a batch, by the column_groups' keys.

        Parameters
        ----------
        where
            Says which row is meant, by its number in the batch; None: by its values.
        """
        self._batch = batch
        self._where = where or self._by_values
        return {group.key: self._tensor(group) for group in self._leaves}

    def _by_values(self, row: int) -> str:
        """A row of a table whose rows have no numbers: what it holds."""
        names = columns_to_read(self._leaves)
        told = []
        for place, name in enumerate(names[:_SHOWN_COLUMNS]):
            text = repr(self._batch.column(place)[row].as_py())
            is_long = len(text) > _SHOWN_CHARACTERS
            told.append(f"{name}={text[: _SHOWN_CHARACTERS - 3] + '...' if is_long else text}")
        more = ", ..." if len(names) > _SHOWN_COLUMNS else ""
        return f"the row ({', '.join(told)}{more})"

    def _tensor(self, group: ColumnGroup) -> Array | Ragged:
        columns = [
            _plain(self._batch.column(place), name, self._where)
            for place, name in zip(group.places, group.columns, strict=True)
        ]
        if group.dtype == TEXT:
            return _strings(columns[0])
        if group.shape == (None,):
            return self._ragged(columns[0], group)
        parts = [
            self._matrix(column, name, group)
            for column, name in zip(columns, group.columns, strict=True)
        ]
        found = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        if group.is_target:
            self._refuse_nan(found, group)
        found = self._cast(found, group, lambda row: row)
        if group.shape is not None:
            return found.reshape(len(found), *group.shape)
        return found.reshape(-1) if group.is_flat else found

    def _matrix(self, column: Any, name: str, group: ColumnGroup) -> Array:
        """Numbers of shape (rows, width)."""
        if name in group.categories:
            return self._codes(column, name, group.categories[name])
        promised = None if group.shape is None else int(np.prod(group.shape))  # type: ignore[arg-type]
        if _is_bytes(column.type):
            return self._bytes(column, name, group.dtype if promised else "uint8", promised)
        values, row_sizes = column, None
        while hasattr(values.type, "value_type"):
            sizes = _sizes(values)
            row_sizes = sizes if row_sizes is None else _summed(sizes, row_sizes)
            values = self._elements(values, name, row_sizes)
        numbers = _numbers(values)
        if row_sizes is None:
            if promised not in (None, 1):
                raise InputError(f"column {name!r} holds one number per row, not {group.shape}")
            return numbers.reshape(-1, 1)
        self._same_width(row_sizes, name, promised, "numbers")
        return numbers.reshape(len(column), -1)

    def _bytes(self, column: Any, name: str, dtype: Any, promised: int | None) -> Array:
        import pyarrow as pa

        wide = column.cast(pa.large_binary())
        offsets = _offsets(wide)
        size = None if promised is None else promised * np.dtype(dtype).itemsize
        self._same_width(np.diff(offsets), name, size, "bytes")
        content = np.frombuffer(wide.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
        rows: Array = content.reshape(len(column), -1).view(dtype)
        return rows

    def _same_width(self, sizes: Array, name: str, promised: int | None, what: str) -> None:
        known = self._widths.setdefault(name, int(sizes[0]) if promised is None else promised)
        if (wrong := np.flatnonzero(sizes != known)).size:
            row = int(wrong[0])
            expected = "as promised in `tensors`" if promised is not None else "as in rows before"
            raise InputError(
                f"column {name!r} holds {int(sizes[row])} {what} in {self._where(row)}; expected "
                f"{known}, {expected}. For rows of any length, say "
                f"tensors={{{name!r}: (dtype, (None,))}}"
            )

    def _ragged(self, column: Any, group: ColumnGroup) -> Ragged:
        name = group.columns[0]
        if not hasattr(column.type, "value_type"):
            raise InputError(f"column {name!r} holds one number per row, not {group.shape}")
        sizes = _sizes(column)
        values = self._elements(column, name, sizes)
        if hasattr(values.type, "value_type"):
            raise InputError(f"column {name!r} holds arrays of arrays: rows of one length need it")
        offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        numbers = _numbers(values)

        def row_of(element: int) -> int:
            return int(np.searchsorted(offsets, element, side="right")) - 1

        if group.is_target and numbers.dtype.kind == "f" and np.isnan(numbers).any():
            row = row_of(int(np.flatnonzero(np.isnan(numbers))[0]))
            raise InputError(f"column {name!r} holds NaN in {self._where(row)}")
        return Ragged(self._cast(numbers, group, row_of), offsets)

    def _cast(self, numbers: Array, group: ColumnGroup, row_of: Callable[[int], int]) -> Array:
        """Numbers in the type of the tensor, in this machine's byte order; none may change."""
        wanted = np.dtype(group.dtype).newbyteorder("=")
        if numbers.dtype == wanted or not numbers.size:
            return numbers.astype(wanted, copy=False)
        with np.errstate(invalid="ignore"):
            cast = numbers.astype(wanted)
        if wanted.kind in "iu" and numbers.dtype.kind in "fiu":
            changed = (cast != numbers).reshape(len(numbers), -1).any(axis=1)
            if changed.any():
                row = row_of(int(np.flatnonzero(changed)[0]))
                raise InputError(
                    f"column {', '.join(map(repr, group.columns))} holds numbers that are no "
                    f"{wanted.name} in {self._where(row)}"
                )
        return cast

    def _elements(self, lists: Any, name: str, row_sizes: Array) -> Any:
        """What lists hold; ``row_sizes`` counts it by row of the batch."""

        def where(element: int) -> str:
            return self._where(int(np.searchsorted(np.cumsum(row_sizes), element, side="right")))

        return _plain(lists.flatten(), name, where)

    def _codes(self, column: Any, name: str, categories: Sequence[Any]) -> Array:
        import pyarrow as pa
        import pyarrow.compute as pc

        try:
            known = pa.array(categories).cast(column.type)
        except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError) as error:
            raise InputError(
                f"`categories` of {name!r} are no values of its type {column.type}: {error}"
            ) from error
        codes = pc.index_in(column, value_set=known)
        if codes.null_count:
            row = int(np.flatnonzero(codes.is_null().to_numpy(zero_copy_only=False))[0])
            listed = ", ".join(map(repr, categories[:10])) + (", ..." * (len(categories) > 10))
            raise InputError(
                f"column {name!r} holds {column[row].as_py()!r} in {self._where(row)}, which is "
                f"none of its categories ({listed})"
            )
        return np.asarray(codes.to_numpy(zero_copy_only=False)).reshape(-1, 1)

    def _refuse_nan(self, found: Array, group: ColumnGroup) -> None:
        if found.dtype.kind != "f":
            return
        missing = np.isnan(found).reshape(len(found), -1).any(axis=1)
        if missing.any():
            what = "weight" if group.key == "sample_weight" else "label"
            row = int(np.flatnonzero(missing)[0])
            raise InputError(
                f"the {what} column {', '.join(map(repr, group.columns))} holds NaN in "
                f"{self._where(row)}: drop or fill those rows first"
            )


def _plain(column: Any, name: str, where: Callable[[int], str]) -> Any:
    """A column without nulls or a dictionary."""
    if column.null_count:
        row = int(np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False))[0])
        place = where(row)
        raise InputError(
            f"column {name!r} holds {column.null_count} null(s), first in {place}: drop or fill "
            "those rows first"
        )
    return column.dictionary_decode() if hasattr(column, "dictionary_decode") else column


def _strings(column: Any) -> Ragged:
    import pyarrow as pa

    wide = column.cast(pa.large_string()).cast(pa.large_binary())
    offsets = _offsets(wide)
    values = np.frombuffer(wide.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    return Ragged(values, offsets - offsets[0], is_text=True)


def _offsets(wide: Any) -> Array:
    """Offsets of a large_binary column's rows in its buffer."""
    if not len(wide):
        return np.zeros(1, np.int64)
    every = np.frombuffer(wide.buffers()[1], np.int64)
    own: Array = every[wide.offset : wide.offset + len(wide) + 1]
    return own


def _sizes(lists: Any) -> Array:
    """Lengths of lists; without nulls, so that fixed-size ones need no look."""
    width = getattr(lists.type, "list_size", None)
    if width is not None:
        return np.full(len(lists), width, np.int64)
    sizes: Array = np.diff(lists.offsets.to_numpy()).astype(np.int64)
    return sizes


def _summed(inner: Array, outer: Array) -> Array:
    """Values of each row, from those of the lists in it."""
    edges = np.concatenate([[0], np.cumsum(outer)])
    totals = np.concatenate([[0], np.cumsum(inner)])
    summed: Array = totals[edges[1:]] - totals[edges[:-1]]
    return summed


def _numbers(values: Any) -> Array:
    import pyarrow as pa

    if pa.types.is_decimal(values.type):
        values = values.cast(pa.float64())
    return np.asarray(values.to_numpy(zero_copy_only=False))


def _is_bytes(kind: Any) -> bool:
    import pyarrow as pa

    is_variable = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return bool(is_variable or pa.types.is_fixed_size_binary(kind))
