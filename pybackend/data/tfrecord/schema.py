"""Columns of records, from the user's specification or a sample of the records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from pybackend.data.tfrecord.chunks import Chunk
from pybackend.data.tfrecord.features import list_names, parse_features, parse_lists, select_by_name
from pybackend.data.tfrecord.types import BYTES, FLOAT, INT64, LISTS
from pybackend.data.tfrecord.values import read_values
from pybackend.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

_TYPES = {"int64": "int64", "float32": "float", "bytes": "binary", "string": "string"}
_NAMES = {INT64: "int64", FLOAT: "float32", BYTES: "bytes"}
_LIST = "[]"


def spec_to_schema(spec: Mapping[str, str]) -> pa.Schema:
    """Convert a checked `tfrecord_spec` to a schema, in its order."""
    import pyarrow as pa

    fields = []
    for name, kind in spec.items():
        element = pa.type_for_alias(_TYPES[kind.removesuffix(_LIST)])
        fields.append((name, pa.list_(element) if kind.endswith(_LIST) else element))
    return pa.schema(fields)


def infer_spec(chunks: Iterable[Chunk]) -> dict[str, str]:
    """Infer the `tfrecord_spec` of a sample, sorted by name.

    A feature is a scalar if each record that has it has one value, otherwise a list. Bytes remain
    bytes: records do not specify whether they are text.

    Raises
    ------
    InputError
        Names the feature that is of two kinds, or whose type cannot be inferred.
    """
    kinds: dict[str, int] = {}
    single: dict[str, bool] = {}
    for chunk in chunks:
        features = parse_features(chunk)
        names = list_names(chunk, features)
        for name, entries in zip(names, select_by_name(chunk, features, names), strict=True):
            lists = parse_lists(chunk, entries)
            if not len(lists.kinds):
                continue
            kind = kinds.setdefault(name, int(lists.kinds[0]))
            if (lists.kinds != kind).any():
                row = int(lists.records[np.argmax(lists.kinds != kind)])
                raise InputError(
                    f"{chunk.name_record(row)} has the feature {name!r} in another kind of list "
                    f"than records before it ({LISTS[kind]}): no column can hold both"
                )
            _, counts = read_values(chunk, lists, kind)
            single[name] = single.get(name, True) and bool((counts == 1).all())
    return {name: _NAMES[kinds[name]] + ("" if single[name] else _LIST) for name in sorted(kinds)}
