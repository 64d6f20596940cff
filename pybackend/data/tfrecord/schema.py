"""What columns records have: as the user says, or as a sample of the records shows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from pybackend.data.tfrecord.chunks import Chunk
from pybackend.data.tfrecord.features import by_name, features_of, lists_of, names_in
from pybackend.data.tfrecord.types import BYTES, FLOAT, INT64, LISTS
from pybackend.data.tfrecord.values import values_of
from pybackend.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

_TYPES = {"int64": "int64", "float32": "float", "bytes": "binary", "string": "string"}
_NAMES = {INT64: "int64", FLOAT: "float32", BYTES: "bytes"}
_LIST = "[]"


def schema_of_spec(spec: Mapping[str, str]) -> pa.Schema:
    """The schema for a checked `tfrecord_spec`, in its order."""
    import pyarrow as pa

    fields = []
    for name, kind in spec.items():
        element = pa.type_for_alias(_TYPES[kind.removesuffix(_LIST)])
        fields.append((name, pa.list_(element) if kind.endswith(_LIST) else element))
    return pa.schema(fields)


def inferred_spec(chunks: Iterable[Chunk]) -> dict[str, str]:
    """The `tfrecord_spec` that fits a sample, by name.

    A feature is a scalar where each record that has it holds one value, otherwise a list. Bytes
    stay bytes: whether they are text, the records do not say.

    Raises
    ------
    InputError
        Names the feature that is of two kinds, or that no type can be told of.
    """
    kinds: dict[str, int] = {}
    single: dict[str, bool] = {}
    for chunk in chunks:
        features = features_of(chunk)
        names = names_in(chunk, features)
        for name, entries in zip(names, by_name(chunk, features, names), strict=True):
            lists = lists_of(chunk, entries)
            if not len(lists.kinds):
                continue
            kind = kinds.setdefault(name, int(lists.kinds[0]))
            if (lists.kinds != kind).any():
                row = int(lists.records[np.argmax(lists.kinds != kind)])
                raise InputError(
                    f"{chunk.named(row)} holds the feature {name!r} in another kind of list than "
                    f"records before it ({LISTS[kind]}): no column can hold both"
                )
            _, counts = values_of(chunk, lists, kind)
            single[name] = single.get(name, True) and bool((counts == 1).all())
    return {name: _NAMES[kinds[name]] + ("" if single[name] else _LIST) for name in sorted(kinds)}
