"""In-memory training data: checked before anything starts, then sharded across the workers.

A data set is ``x``, ``(x, y)`` or ``(x, y, sample_weight)``; ``x`` and ``y`` are an array, or a
list, tuple or dict of arrays for models with several inputs or outputs. Internally, it is a flat
dict of arrays named ``x``, ``x/#0``, ``x/left``, ...; these names encode the structure. A column
whose rows differ in length, such as text, is `Ragged`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from pybackend.core.data.files import is_path
from pybackend.core.data.sharding import shard_slice
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import counted
from pybackend.core.words import row_number, setting, show, term

Array = npt.NDArray[Any]
Columns = dict[str, Array]

_NUMBERS_FOR_TEXT = (
    " or booleans: np.unique(labels, return_inverse=True) gives the classes and their codes; or "
    "pass a data frame with `label=`, which encodes text"
)
_DAYS = {
    "M": "(times - times.min()) / np.timedelta64(1, 'D')",
    "m": "times / np.timedelta64(1, 'D')",
}
# Largest dense array made of a sparse matrix: this process holds it in memory and sends it.
MOST_DENSE_BYTES = 2 << 30
_PARTS = ("x", "y", "sample_weight")
# TensorFlow's tensors that are not rectangular arrays, and how to convert them.
_TO_DENSE = {"RaggedTensor": "x.to_tensor()", "SparseTensor": "tf.sparse.to_dense(x)"}


@dataclass(frozen=True)
class Ragged:
    """Rows of different lengths: row i is ``values[offsets[i]:offsets[i + 1]]``.

    With ``values`` of shape (n, 3), a row is a list of vectors of 3 numbers. With ``is_text`` the
    values are UTF-8 bytes, and a row is one string. With ``most_texts``, which is at least the
    length of the longest list, a row is a list of strings (see `pack_lists`).
    """

    values: Array
    offsets: Array
    is_text: bool = False
    most_texts: int | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Array:
        return np.diff(self.offsets)

    def __getitem__(self, rows: slice) -> Ragged:
        indices = np.arange(len(self))[rows]
        lengths = self.lengths[indices]
        offsets = to_offsets(lengths)
        elements = np.repeat(self.offsets[indices] - offsets[:-1], lengths) + np.arange(offsets[-1])
        return replace(self, values=self.values[elements], offsets=offsets)


def to_offsets(lengths: Sequence[int] | Array) -> Array:
    """Return the starts of consecutive pieces, and the end of the last one."""
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets


def concatenate(parts: Sequence[Ragged]) -> Ragged:
    offsets = to_offsets(np.concatenate([part.lengths for part in parts]))
    values = [part.values[part.offsets[0] : part.offsets[-1]] for part in parts]
    most = None if parts[0].most_texts is None else max(part.most_texts or 0 for part in parts)
    return Ragged(np.concatenate(values), offsets, parts[0].is_text, most)


def join_texts(texts: Sequence[bytes], rows: int) -> Ragged:
    """Return strings as this number of rows, each with the same number of strings."""
    offsets = to_offsets(list(map(len, texts)))
    column = Ragged(np.frombuffer(b"".join(texts), np.uint8), offsets, is_text=True)
    return column if len(texts) == rows else pack_lists(column, np.full(rows, len(texts) // rows))


def pack_lists(texts: Ragged, sizes: Array) -> Ragged:
    """Join strings to lists of these sizes; in a row, each string follows its length in 4 bytes."""
    starts = texts.offsets[:-1] + 4 * np.arange(len(texts))
    packed = np.empty(len(texts.values) + 4 * len(texts), np.uint8)
    is_length = np.zeros(len(packed), bool)
    heads = starts[:, None] + np.arange(4)
    is_length[heads] = True
    packed[heads] = texts.lengths.astype("<u4").view(np.uint8).reshape(-1, 4)
    packed[~is_length] = texts.values
    offsets = np.append(starts, len(packed))[to_offsets(sizes)]
    return Ragged(packed, offsets, is_text=True, most_texts=int(sizes.max(initial=0)))


def unpack_list(row: bytes) -> list[bytes]:
    """The inverse of `pack_lists`, for one row."""
    texts, start = [], 0
    while start < len(row):
        end = start + 4 + int.from_bytes(row[start : start + 4], "little")
        texts.append(row[start + 4 : end])
        start = end
    return texts


def to_dense(column: Array | Ragged, longest: int = 0) -> Array:
    """Pad the values of a column with zeros to at least ``longest``, or convert them to strings.

    Strings have shape (rows, 1), lists of strings (rows, longest), padded with empty strings.
    """
    if not isinstance(column, Ragged):
        return column
    values = column.values[column.offsets[0] : column.offsets[-1]]
    if column.is_text:
        content, edges = values.tobytes(), (column.offsets - column.offsets[0]).tolist()
        rows = [content[first:last] for first, last in pairwise(edges)]
        if column.most_texts is None:
            return to_strings([[row] for row in rows], 1)
        return to_strings([unpack_list(row) for row in rows], longest)
    lengths = column.lengths
    width = max(longest, int(lengths.max(initial=0)))
    padded = np.zeros((len(column), width, *values.shape[1:]), values.dtype)
    padded[np.arange(width) < lengths[:, None]] = values
    return padded


def to_strings(rows: Sequence[Sequence[bytes]], longest: int) -> Array:
    """Pad lists of strings with empty ones, to at least this length."""
    strings = np.full((len(rows), max([longest, *map(len, rows)])), b"", object)
    for row, texts in enumerate(rows):
        strings[row, : len(texts)] = texts
    return strings


def flatten_data(data: Any, floatx: str = "float32", name: str = "data") -> Columns:
    """Check a data set and flatten it to named arrays of equal length.

    Floating-point arrays become ``floatx``, as in Keras's own ``fit``; the types of integers and
    booleans do not change. Text among the inputs becomes `Ragged`. An `InputError` names the array
    and what is wrong with it.
    """
    if isinstance(data, Mapping) or hasattr(data, "__array__"):
        data = (data,)
    if not isinstance(data, (tuple, list)) or not 1 <= len(data) <= 3:
        if type(data).__name__ == "LazyFrame":
            raise InputError(f"`{name}` is a LazyFrame without rows: call its collect() first")
        raise InputError(
            f"`{name}` must be x, {term('(x, y)')} or {term('(x, y, sample_weight)')} of arrays, a "
            f"{term('Spark DataFrame')}, a {term('pandas or polars data frame')}, a "
            "tf.data.Dataset or keras.utils.PyDataset, the path of Parquet or TFRecord files, or "
            f"a function that returns a tf.data.Dataset, not {_describe_type(data)}"
        )
    columns: Columns = {}
    for part, value in zip(_PARTS, data, strict=False):
        if value is not None:
            for key, array in flatten_part(part, value):
                columns[key] = to_array(key, array, floatx, name)
    parts = {key.partition("/")[0] for key in columns}
    if "x" not in parts:
        raise InputError(f"`{name}` has no inputs: pass x or {term('(x, y)')}")
    if "sample_weight" in parts and "y" not in parts:
        raise InputError(
            f"`{name}` has sample weights but no labels: pass {term('(x, y, sample_weight)')}"
        )
    check_equal_counts({key: len(array) for key, array in columns.items()}, f"arrays of `{name}`")
    return columns


def flatten_inputs(x: Any, floatx: str = "float32", *, may_be_empty: bool = False) -> Columns:
    """Flatten inputs without labels, like `flatten_data`."""
    columns = {key: to_array(key, value, floatx, "x") for key, value in flatten_part("x", x)}
    if not columns:
        raise InputError("`x` has no inputs")
    check_equal_counts({key: len(array) for key, array in columns.items()}, "arrays of `x`")
    if count_rows(columns) == 0 and not may_be_empty:
        raise InputError("`x` has no rows")
    return columns


def nest(columns: Mapping[str, Any]) -> Any:
    """Rebuild a batch from flat, named leaves: x, (x, y) or (x, y, sample_weight).

    The structure is the one that Keras passes to ``train_step``: several inputs without labels are
    (x,).
    """
    parts = [_nest_part(part, columns) for part in _PARTS]
    while parts[-1] is None:
        parts.pop()
    x = parts[0]
    return x if len(parts) == 1 and (not isinstance(x, tuple) or len(x) == 1) else tuple(parts)


def flatten(batch: Any) -> dict[str, Any]:
    """Return the named leaves of a batch, unchanged; the inverse of `nest`."""
    # A batch (x,) is a list of one input, so that `nest` gives (x,), not x.
    is_x = not isinstance(batch, tuple) or (len(batch) == 1 and hasattr(batch[0], "shape"))
    parts = zip(_PARTS, (batch,) if is_x else batch, strict=False)
    return {key: leaf for part, value in parts for key, leaf in flatten_part(part, value)}


def count_rows(columns: Mapping[str, Any]) -> int:
    return len(next(iter(columns.values()), ()))


def check_row_shapes(parts: Iterable[Any], what: str, where: str = "in different batches") -> None:
    shapes = sorted({part.shape[1:] for part in parts})
    if len(shapes) > 1:
        raise InputError(
            f"{what} has rows of shapes {show(shapes[0])} and {show(shapes[1])} {where}: pad them "
            "to the same shape"
        )


def shard(columns: Columns, workers: int, rank: int) -> Columns:
    """The rows of one worker are views, not copies."""
    part = shard_slice(count_rows(columns), workers, rank)
    return {key: array[part] for key, array in columns.items()}


def check_enough_rows(rows: int, workers: int, argument: str = "workers") -> None:
    """``argument`` is the one that sets the number of workers."""
    if rows == 0:
        raise InputError("`data` has no rows")
    if rows < workers:
        raise InputError(
            f"`data` has {counted(rows, 'row')}, fewer than {setting(**{argument: workers})}: "
            f"use at most {counted(rows, 'worker')}"
        )


def flatten_part(name: str, value: Any) -> list[tuple[str, Any]]:
    """Return the named leaves of x, y or sample_weight."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str) or not key or "/" in key or key.startswith("#"):
                raise InputError(
                    f"`{name}` has an input named {show(key)}: use names without '/' that do not "
                    "begin with '#'"
                )
        return [(f"{name}/{key}", item) for key, item in value.items()]
    # A list of numpy scalars, whose shape is (), is one array.
    if isinstance(value, (list, tuple)) and value and all(getattr(v, "shape", ()) for v in value):
        # A leading "#" distinguishes a list of two from a dict with the keys "0" and "1".
        return [(f"{name}/#{index}", item) for index, item in enumerate(value)]
    return [(name, value)]


def _nest_part(part: str, columns: Mapping[str, Any]) -> Any:
    if part in columns:
        return columns[part]
    keys = [key for key in columns if key.startswith(part + "/")]
    if not keys:
        return None
    leaves = {key[len(part) + 1 :]: columns[key] for key in keys}
    if all(key.startswith("#") for key in leaves):
        return tuple(leaves[f"#{index}"] for index in range(len(leaves)))
    return leaves


def to_array(key: str, value: Any, floatx: str, name: str) -> Array:
    """Check and convert one array, as `flatten_data` does."""
    if np.ma.is_masked(value):
        row = int(np.argwhere(np.ma.getmaskarray(value))[0][0])
        raise InputError(
            f"`{key}` of `{name}` has masked values, first in {row_number(row)}: fill them, or "
            "leave these rows out"
        )
    sparse = sys.modules.get("scipy.sparse")  # nothing is sparse if it was not imported
    if sparse is not None and sparse.issparse(value):
        value = _densify(value, key, floatx, name)
    try:
        array = np.asarray(value)
    except ValueError as error:  # a ragged list
        raise InputError(f"`{key}` of `{name}` is not a rectangular array: {error}") from error
    if array.ndim == 0:
        if (way := _TO_DENSE.get(type(value).__name__)) is not None:
            raise InputError(f"`{key}` of `{name}` is a {type(value).__name__}: pass {way}")
        accepted = "; only barrier_train, evaluate and result.predict accept a path"
        raise InputError(
            f"`{key}` of `{name}` is a single value; expected one entry per row"
            + accepted * is_path(value)
        )
    if key.startswith("x") and _is_text(array):
        return cast(Array, _to_text(array, key, name))
    if array.dtype.kind == "f" and array.dtype != np.dtype(floatx):
        array = narrow(array, floatx, lambda row: f"`{key}` of `{name}` in row {row}")
    if array.dtype.kind not in "fiub":
        expected = ", booleans or text" if key.startswith("x") else _NUMBERS_FOR_TEXT
        if array.dtype.kind in "mM":
            expected = ": e.g. days, " + _DAYS[array.dtype.kind]
        raise InputError(f"`{key}` of `{name}` has dtype {array.dtype}; expected numbers{expected}")
    # TensorFlow reads the bytes in the machine's order.
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    if not key.startswith("x") and array.dtype.kind == "f" and np.isnan(array).any():
        row = int(np.argwhere(np.isnan(array))[0][0])
        raise InputError(f"`{key}` of `{name}` has a NaN in {row_number(row)}")
    return array


def narrow(numbers: Array, dtype: Any, name_row: Callable[[int], str]) -> Array:
    """Cast numbers to another floating-point type; an `InputError` names one that becomes infinite.

    ``name_row`` receives a row number, from 0, and returns the column and row for the message.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        found = numbers.astype(dtype)
    if np.isinf(found).any():
        is_lost = np.isinf(found) & np.isfinite(numbers)
        if is_lost.any():
            index = tuple(np.argwhere(is_lost)[0])
            raise InputError(
                f"{name_row(int(index[0]))} has the number {numbers[index]:g}, which is out of "
                f"range for {np.dtype(dtype).name}: scale the column or use its logarithm"
            )
    return found


def _densify(matrix: Any, key: str, floatx: str, name: str) -> Array:
    dtype = np.dtype(floatx) if matrix.dtype.kind == "f" else matrix.dtype
    size = math.prod(matrix.shape) * dtype.itemsize
    if size > MOST_DENSE_BYTES:
        raise InputError(
            f"`{key}` of `{name}` is a sparse matrix of shape {show(matrix.shape)}, which "
            f"takes {size / 2**30:.1f} GiB as the dense array that training needs (the limit "
            f"is {MOST_DENSE_BYTES >> 30}): write dense rows to Parquet files in parts, or pass a "
            "function that makes each worker's batches"
        )
    dense: Array = matrix.astype(dtype).toarray()
    return dense


def _is_text(array: Array) -> bool:
    if array.dtype.kind == "O":
        return all(isinstance(text, (str, bytes)) for text in array.flat)
    return array.dtype.kind in "US"


def _to_text(array: Array, key: str, name: str) -> Ragged:
    if array.ndim > 2:
        raise InputError(
            f"`{key}` of `{name}` is text of shape {show(array.shape)}; expected one string or one "
            "list of strings per row"
        )
    return join_texts(
        [text if isinstance(text, bytes) else str(text).encode() for text in array.flat], len(array)
    )


def check_equal_counts(counts: Mapping[str, int], what: str) -> None:
    if len(set(counts.values())) > 1:
        raise InputError(f"the {what} differ in their number of rows ({list_counts(counts)})")


def list_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{key}: {count}" for key, count in counts.items())


def _describe_type(value: Any) -> str:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"{type(value).__module__}.{type(value).__qualname__}"
