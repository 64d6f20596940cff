"""Kinds of values beyond JSON's own that a worker's function may return.

A received value equals the sent one and has the same class; otherwise it is rejected. So classes
are matched exactly: a derived class does not match.
"""

from __future__ import annotations

import collections
import decimal
import fractions
import pathlib
import types
import uuid
from collections.abc import Sequence
from typing import Any

from pybackend.core.job.value_kind import CLASSES, UnfitError, ValueKind, exactly, is_of
from pybackend.core.job.value_tables import TABLES
from pybackend.core.job.value_times import TIMES


def _make_row(names: list[str] | None, items: list[Any]) -> Any:
    from pyspark.sql import Row

    row: Any = tuple.__new__(Row, items)
    if names is not None:
        row.__fields__ = [str(name) for name in names]
    return row


def _make_vector(*parts: Any) -> Any:
    from pyspark.ml import linalg

    return (linalg.DenseVector if len(parts) == 1 else linalg.SparseVector)(*parts)


# Allowed default factories of a defaultdict: no user code.
_FACTORIES: dict[Any, Any] = {kind.__name__: kind for kind in (int, float, str, list, dict, set)}
_FACTORIES[None] = None


def _take_default(value: collections.defaultdict[Any, Any]) -> Sequence[Any]:
    name = getattr(value.default_factory, "__name__", None)
    if _FACTORIES.get(name, name) is not value.default_factory:
        raise UnfitError("its default factory is code: return it as dict(...)")
    return [name, dict(value)]


def _is_tensor(value: Any) -> bool:
    has_values = any(
        is_of(module, *names, or_derived=True)(value)
        for module, *names in (("keras", "Variable"), ("tensorflow", "Tensor", "Variable"))
    )
    return has_values and hasattr(value, "numpy")


_HISTORY = ("history", "epoch", "params")

# Integers and text only if JSON cannot write them.
PLAIN: tuple[ValueKind, ...] = (
    exactly(int, lambda v: [hex(v)], lambda text: int(text, 16)),
    exactly(
        str,
        lambda v: [v.encode("utf-32-le", "surrogatepass")],
        lambda content: content.decode("utf-32-le", "surrogatepass"),
    ),
    exactly(tuple, lambda v: [list(v)]),
    exactly(set, lambda v: [list(v)]),
    exactly(frozenset, lambda v: [list(v)]),
)
KINDS: tuple[ValueKind, ...] = (
    *PLAIN,
    *CLASSES,
    # A view, as the number in a damaged value would make so many zeros.
    exactly(bytearray, lambda v: [bytes(v)], lambda content: bytearray(memoryview(content))),
    exactly(collections.OrderedDict, lambda v: [dict(v)]),
    exactly(collections.Counter, lambda v: [dict(v)]),
    exactly(
        collections.defaultdict,
        _take_default,
        lambda name, items: collections.defaultdict(_FACTORIES[name], items),
    ),
    exactly(collections.deque, lambda v: [list(v), v.maxlen]),
    exactly(range, lambda v: [v.start, v.stop, v.step]),
    exactly(complex, lambda v: [v.real, v.imag]),
    exactly(decimal.Decimal, lambda v: [str(v)]),
    exactly(fractions.Fraction, lambda v: [v.numerator, v.denominator]),
    exactly(uuid.UUID, lambda v: [str(v)]),
    *(
        exactly(kind, lambda v: [str(v)])
        for kind in (pathlib.PosixPath, pathlib.PurePosixPath, pathlib.PureWindowsPath)
    ),
    *TIMES,
    *TABLES,
    ValueKind(
        "row",
        is_of("pyspark.sql", "Row"),
        lambda v: [vars(v).get("__fields__"), list(v)],
        _make_row,
    ),
    ValueKind(
        "dense vector",
        is_of("pyspark.ml.linalg", "DenseVector"),
        lambda v: [v.array],
        _make_vector,
    ),
    ValueKind(
        "sparse vector",
        is_of("pyspark.ml.linalg", "SparseVector"),
        lambda v: [int(v.size), v.indices, v.values],
        _make_vector,
    ),
    ValueKind(
        "history",
        is_of("keras.callbacks", "History", or_derived=True),
        lambda v: [getattr(v, name, None) for name in _HISTORY],
        lambda *parts: types.SimpleNamespace(**dict(zip(_HISTORY, parts, strict=True))),
        lambda _, index: f".{_HISTORY[index]}",
    ),
    ValueKind("tensor", _is_tensor, lambda v: [v.numpy()], lambda array: array),
)
