"""Rows and vectors of Spark as values that workers send."""

from __future__ import annotations

from typing import Any

from pybackend.job.value_kind import Fields, Pack, Unpack, ValueKind, is_of


def _pack_row(value: Any, pack: Pack) -> Fields:
    names = vars(value).get("__fields__")
    items = [pack(item, f"[{place}]") for place, item in enumerate(value)]
    return {"names": None if names is None else list(names), "items": items}


def _unpack_row(fields: Fields, unpack: Unpack) -> Any:
    from pyspark.sql import Row

    row: Any = tuple.__new__(Row, [unpack(item) for item in fields["items"]])
    if fields["names"] is not None:
        row.__fields__ = [str(name) for name in fields["names"]]
    return row


def _unpack_dense(fields: Fields, unpack: Unpack) -> Any:
    from pyspark.ml.linalg import DenseVector

    return DenseVector(unpack(fields["values"]))


def _unpack_sparse(fields: Fields, unpack: Unpack) -> Any:
    from pyspark.ml.linalg import SparseVector

    return SparseVector(fields["size"], unpack(fields["indices"]), unpack(fields["values"]))


OF_SPARK: tuple[ValueKind, ...] = (
    ValueKind("row", is_of("pyspark.sql", "Row"), _pack_row, _unpack_row),
    ValueKind(
        "dense vector",
        is_of("pyspark.ml.linalg", "DenseVector"),
        lambda v, pack: {"values": pack(v.array, "")},
        _unpack_dense,
    ),
    ValueKind(
        "sparse vector",
        is_of("pyspark.ml.linalg", "SparseVector"),
        lambda v, pack: {
            "size": int(v.size),
            "indices": pack(v.indices, ""),
            "values": pack(v.values, ""),
        },
        _unpack_sparse,
    ),
)
