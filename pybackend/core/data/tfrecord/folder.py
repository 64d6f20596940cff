"""A folder of records: its manifest, and the single step that publishes it.

Tasks write into a temporary subfolder, which readers skip, with a different file name for each
attempt. When the job has ended, the files from the successful attempts are moved into place.
Writing the manifest then makes them the current data. Only after that are the previous files
removed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Any

import pyarrow as pa

from pybackend.core.data.files import Folder, open_folder
from pybackend.core.data.tfrecord.encode import RecordFile
from pybackend.core.data.tfrecord.framing import SUFFIX, Compression, check_compression
from pybackend.core.data.tfrecord.protobuf import to_schema
from pybackend.core.errors import InputError
from pybackend.core.job.codec import read_fields
from pybackend.core.words import setting, show

NAME = "_tfdist.json"
SUCCESS = "_SUCCESS"
TEMPORARY = "_temporary-"
_VERSION = 1
_DIGEST = "sha256"
# Written before the tasks run: a task that does not see it is on a machine without this folder.
_STARTED = "_started"
# The files that `overwrite` may replace.
_OWN = re.compile(r"part-.*|.*\.tfrecords?(\..*)?|_SUCCESS|_tfdist\.json|_temporary.*|\..*\.crc")


@dataclass(frozen=True)
class RecordsManifest:
    """The files of a data set and its columns."""

    fields: dict[str, Any]  # the columns, as the JSON of a Spark StructType
    compression: Compression
    parts: tuple[RecordFile, ...]  # the files, in row order

    @property
    def schema(self) -> pa.Schema:
        return to_schema(self.fields)

    def to_json(self) -> dict[str, Any]:
        """The plain data include a digest."""
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
    def from_json(cls, values: Mapping[str, Any]) -> RecordsManifest:
        """Restore a manifest from the data that `to_json` returned.

        Raises `ValueError` if the digest is missing or wrong, a value has the wrong type, or two
        values contradict each other.
        """
        rest = {name: value for name, value in values.items() if name != _DIGEST}
        if values.get(_DIGEST) != _digest(rest):
            raise ValueError("it was altered: its digest is missing or wrong")
        if rest["version"] != _VERSION:
            raise ValueError(f"its version is {rest['version']}, expected {_VERSION}")
        parts = tuple(read_fields(RecordFile, part) for part in rest["files"])
        for part in parts:
            _check_part(part)
        rows = sum(part.rows for part in parts)
        if rest["rows"] != rows:
            raise ValueError(f"it lists {rest['rows']} rows, but its files have {rows}")
        to_schema(rest["schema"])
        return cls(rest["schema"], check_compression(rest["compression"]), parts)

    def check(self, folder: Folder) -> None:
        """Raise `InputError` for a file that is missing or has a different size."""
        for part in self.parts:
            size = folder.size(part.name)
            if size != part.size:
                there = "is missing" if size is None else f"has {size} bytes"
                raise InputError(
                    f"{folder.path(part.name)} {there}; expected {part.size} bytes according to "
                    f"{NAME}: write or copy the data again"
                )


def read_manifest(folder: Folder) -> RecordsManifest | None:
    """Return None if there is no manifest; raise `InputError` if it cannot be read."""
    content = folder.read(NAME)
    if content is None:
        return None
    try:
        values = json.loads(content)
        if not isinstance(values, dict):
            raise ValueError("it is not a JSON object")
        return RecordsManifest.from_json(values)
    except Exception as error:  # damage ends in errors of all kinds
        raise InputError(
            f"{folder.path(NAME)} cannot be read ({type(error).__name__}: {error}): remove it to "
            "read the records without it"
        ) from error


def _check_part(part: RecordFile) -> None:
    if "/" in part.name or "\0" in part.name or part.name in ("", ".", ".."):
        raise ValueError("it lists files outside of its folder")
    ends = [*part.marks, (part.rows, part.size)]
    # A reader begins at a mark: with marks out of order, it would read other rows.
    is_ordered = all(one[0] < other[0] and one[1] < other[1] for one, other in pairwise(ends))
    if part.rows < 1 or (part.marks and part.marks[0] != (0, 0)) or not is_ordered:
        raise ValueError(f"the rows, size and marks of {show(part.name)} contradict each other")


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def begin(uri: str, token: str, overwrite: bool) -> bool:
    """Prepare the folder for the tasks; return whether it is new.

    Raises `InputError` if the folder holds other files, or cannot be written to.
    """
    folder = open_folder(uri)
    if folder.is_file():
        raise InputError(f"`path`: {show(uri)} is a file; expected a folder, new or empty")
    old = _list_old_names(folder)
    if old and not overwrite:
        raise InputError(
            f"`path`: {show(uri)} is not empty, it contains {old[0]}: choose another folder, or "
            f"replace its content with {setting(overwrite=True)}"
        )
    if strange := [name for name in old if not _OWN.fullmatch(name)]:
        raise InputError(
            f"`path`: {show(uri)} contains {strange[0]}, but {setting(overwrite=True)} replaces "
            "only records: choose another folder"
        )
    try:
        is_new = folder.make()
        folder.write(f"{TEMPORARY}{token}/{_STARTED}", b"")
    except Exception as error:  # each file system has its own errors
        raise InputError(f"`path`: {show(uri)} cannot be written: {error}") from error
    return is_new


def is_begun(uri: str, token: str) -> bool:
    """True if this machine can see the folder that `begin` prepared."""
    return open_folder(uri).size(f"{TEMPORARY}{token}/{_STARTED}") is not None


def choose_path(uri: str, token: str, attempt: str) -> str:
    """For the file of a task attempt."""
    return open_folder(uri).path(f"{TEMPORARY}{token}/{attempt}")


def finish(uri: str, token: str, values: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """Make the attempts' files listed in a manifest the current data, and return the new manifest.

    Raises `InputError` if this machine cannot see the files, or others were added in the meantime.
    """
    folder = open_folder(uri)
    written = RecordsManifest.from_json(values)
    old = _list_old_names(folder)
    if old and not overwrite:
        raise InputError(f"`path`: {old[0]} appeared in {show(uri)} while the records were written")
    # The token makes the names of new files differ from those of the files that they replace.
    names = {
        part.name: f"part-{number:05d}-{token[:8]}.tfrecord{SUFFIX[written.compression]}"
        for number, part in enumerate(written.parts)
    }
    for part in written.parts:
        if folder.size(f"{TEMPORARY}{token}/{part.name}") != part.size:
            raise InputError(
                f"`path`: a task wrote {choose_path(uri, token, part.name)}, which this machine "
                "cannot see: use a file system that all machines share, or a URI"
            )
    parts = tuple(replace(part, name=names[part.name]) for part in written.parts)
    manifest = replace(written, parts=parts).to_json()
    _publish(folder, token, names, manifest)
    for name in old:
        if name not in (NAME, SUCCESS):
            folder.remove(name)
    folder.write(SUCCESS, b"")
    folder.remove(f"{TEMPORARY}{token}")
    return manifest


def discard(uri: str, token: str, is_new: bool) -> None:
    folder = open_folder(uri)
    # Tasks of the job may still be writing there.
    for _ in range(3):
        with suppress(Exception):
            folder.remove(f"{TEMPORARY}{token}")
    if is_new:
        folder.remove_itself()


def _publish(folder: Folder, token: str, names: dict[str, str], manifest: dict[str, Any]) -> None:
    moved = []
    was_complete = folder.size(SUCCESS) is not None
    try:
        for attempt, name in names.items():
            folder.move(f"{TEMPORARY}{token}/{attempt}", name)
            moved.append(name)
        folder.remove(SUCCESS)
        # From here on, these are the data.
        folder.write(NAME, json.dumps(manifest, indent=1).encode())
    except BaseException:
        for name in moved:
            folder.remove(name)
        if was_complete:
            folder.write(SUCCESS, b"")
        raise


def _list_old_names(folder: Folder) -> list[str]:
    return [name for name in folder.names() or [] if not name.startswith(TEMPORARY)]
