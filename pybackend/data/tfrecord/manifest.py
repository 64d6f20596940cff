"""What a folder of records says of itself: the file `_tfdist.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from pybackend.data.folder import Folder
from pybackend.data.tfrecord.compression import Compression
from pybackend.data.tfrecord.part import Part
from pybackend.data.tfrecord.types import to_schema
from pybackend.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

NAME = "_tfdist.json"
SUCCESS = "_SUCCESS"
TEMPORARY = "_temporary-"
_VERSION = 1


@dataclass(frozen=True)
class Manifest:
    """The files of a data set and its columns.

    Attributes
    ----------
    fields
        The columns, as the JSON of Spark's StructType.
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
        """As plain data."""
        return {
            "format": "tfrecord",
            "version": _VERSION,
            "compression": self.compression,
            "rows": sum(part.rows for part in self.parts),
            "schema": self.fields,
            "files": [asdict(part) for part in self.parts],
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Manifest:
        """The inverse of `to_json`."""
        parts = [
            Part(**{**part, "marks": tuple((row, place) for row, place in part["marks"])})
            for part in values["files"]
        ]
        if any("/" in part.name or part.name in ("", ".", "..") for part in parts):
            raise ValueError("it names files outside of its folder")
        return cls(values["schema"], values["compression"], tuple(parts))

    def check(self, folder: Folder) -> None:
        """Reject a folder whose files are not those that were written.

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
                    f"{folder.path(part.name)} {there}, and {NAME} beside it says that it has "
                    f"{part.size}: write or copy the data again"
                )


def read_manifest(folder: Folder) -> Manifest | None:
    """The manifest of a folder, or None.

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
        if values["version"] != _VERSION:
            raise ValueError(f"its version is {values['version']}, expected {_VERSION}")
        return Manifest.from_json(values)
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(
            f"{folder.path(NAME)} cannot be read ({type(error).__name__}: {error}): remove it to "
            "read the records without it"
        ) from error
