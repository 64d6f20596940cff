"""Manifest of a folder of records: the file `_tfdist.json`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from pybackend.data.folder import Folder
from pybackend.data.tfrecord.compression import Compression, check_compression
from pybackend.data.tfrecord.part import Part
from pybackend.data.tfrecord.types import to_schema
from pybackend.errors import InputError
from pybackend.job.codec import read_fields

if TYPE_CHECKING:
    import pyarrow as pa

NAME = "_tfdist.json"
SUCCESS = "_SUCCESS"
TEMPORARY = "_temporary-"
_VERSION = 1
_DIGEST = "sha256"


@dataclass(frozen=True)
class Manifest:
    """The files of a data set and its columns.

    Attributes
    ----------
    fields
        The columns, as JSON of a Spark StructType.
    parts
        The files in the order of their rows.
    """

    fields: dict[str, Any]
    compression: Compression
    parts: tuple[Part, ...]

    @property
    def schema(self) -> pa.Schema:
        """The columns with their Arrow types."""
        return to_schema(self.fields)

    def to_json(self) -> dict[str, Any]:
        """Convert to plain data with a digest."""
        values = {
            "format": "tfrecord",
            "version": _VERSION,
            "compression": self.compression,
            "rows": sum(part.rows for part in self.parts),
            "schema": self.fields,
            "files": [asdict(part) for part in self.parts],
        }
        return {**values, _DIGEST: _digest(values)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Manifest:
        """Convert the data of `to_json` back.

        Raises
        ------
        ValueError
            The digest is missing or wrong, a value has the wrong type, or two values contradict
            each other.
        """
        rest = {name: value for name, value in values.items() if name != _DIGEST}
        if values.get(_DIGEST) != _digest(rest):
            raise ValueError("it was altered: its digest is missing or wrong")
        if rest["version"] != _VERSION:
            raise ValueError(f"its version is {rest['version']}, expected {_VERSION}")
        parts = tuple(read_fields(Part, part) for part in rest["files"])
        for part in parts:
            _check_part(part)
        rows = sum(part.rows for part in parts)
        if rest["rows"] != rows:
            raise ValueError(f"it names {rest['rows']} rows, and its files have {rows}")
        to_schema(rest["schema"])
        return cls(rest["schema"], check_compression(rest["compression"]), parts)

    def check(self, folder: Folder) -> None:
        """Raise an error if the folder's files are not those that were written.

        Raises
        ------
        InputError
            Names the file that is missing, or has another size.
        """
        for part in self.parts:
            size = folder.size(part.name)
            if size != part.size:
                there = "is missing" if size is None else f"has {size} bytes"
                raise InputError(
                    f"{folder.path(part.name)} {there}; expected {part.size} bytes according to "
                    f"{NAME}: write or copy the data again"
                )


def read_manifest(folder: Folder) -> Manifest | None:
    """Read the manifest of a folder; return None if it does not exist.

    Raises
    ------
    InputError
        It cannot be read.
    """
    content = folder.read(NAME)
    if content is None:
        return None
    try:
        values = json.loads(content)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        return Manifest.from_json(values)
    except Exception as error:  # damage ends in errors of all kinds
        raise InputError(
            f"{folder.path(NAME)} cannot be read ({type(error).__name__}: {error}): remove it to "
            "read the records without it"
        ) from error


def _check_part(part: Part) -> None:
    if "/" in part.name or "\0" in part.name or part.name in ("", ".", ".."):
        raise ValueError("it names files outside of its folder")
    ends = [*part.marks, (part.rows, part.size)]
    # A reader begins at a mark: with marks out of order, it would read other rows.
    is_ordered = all(one[0] < other[0] and one[1] < other[1] for one, other in pairwise(ends))
    if part.rows < 1 or (part.marks and part.marks[0] != (0, 0)) or not is_ordered:
        raise ValueError(f"the rows, size and marks of {part.name!r} contradict each other")


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
