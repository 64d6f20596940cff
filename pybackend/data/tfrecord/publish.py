"""Write a folder of records atomically: all of it, or nothing.

Tasks write into a temporary subfolder, which readers skip, under one name per attempt. When the job
has ended, the files of the successful attempts are moved to their place. The manifest then makes
them the data, and only after that are the previous files removed.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

from pybackend.data.folder import Folder, open_folder
from pybackend.data.tfrecord.compression import SUFFIX
from pybackend.data.tfrecord.manifest import NAME, SUCCESS, TEMPORARY, Manifest
from pybackend.errors import InputError

# Written before the tasks run: a task that does not see it is on a machine without this folder.
_STARTED = "_started"
# The files that `overwrite` may replace.
_RECORDS = re.compile(
    r"part-.*|.*\.tfrecords?(\..*)?|_SUCCESS|_tfdist\.json|_temporary.*|\..*\.crc"
)


def begin(uri: str, token: str, overwrite: bool) -> bool:
    """Prepare the folder for the tasks; return whether it is new.

    Raises
    ------
    InputError
        The folder holds other files, or cannot be written.
    """
    folder = open_folder(uri)
    if folder.is_file():
        raise InputError(f"`path`: {uri!r} is a file; expected a folder, new or empty")
    old = _list_old_names(folder)
    if old and not overwrite:
        raise InputError(
            f"`path`: {uri!r} is not empty, it holds {old[0]}: choose another folder, or replace "
            "its content with overwrite=True"
        )
    strange = [name for name in old if not _RECORDS.fullmatch(name)]
    if strange:
        raise InputError(
            f"`path`: {uri!r} holds {strange[0]}, and overwrite=True replaces only records: choose "
            "another folder"
        )
    try:
        is_new = folder.make()
        folder.write(f"{TEMPORARY}{token}/{_STARTED}", b"")
    except Exception as error:  # each file system has its own errors
        raise InputError(f"`path`: {uri!r} cannot be written: {error}") from error
    return is_new


def is_begun(uri: str, token: str) -> bool:
    """Return whether this machine sees the folder that `begin` prepared."""
    return open_folder(uri).size(f"{TEMPORARY}{token}/{_STARTED}") is not None


def choose_path(uri: str, token: str, attempt: str) -> str:
    """Return the path to which an attempt of a task writes its file."""
    return open_folder(uri).path(f"{TEMPORARY}{token}/{attempt}")


def finish(uri: str, token: str, values: dict[str, Any], overwrite: bool) -> dict[str, Any]:
    """Make the files of the attempts in a manifest the data, and return the new manifest.

    Raises
    ------
    InputError
        This machine does not see the files, or others were added meanwhile.
    """
    folder = open_folder(uri)
    written = Manifest.from_json(values)
    old = _list_old_names(folder)
    if old and not overwrite:
        raise InputError(f"`path`: {old[0]} appeared in {uri!r} while the records were written")
    names = {
        part.name: _build_name(number, token, written) for number, part in enumerate(written.parts)
    }
    for part in written.parts:
        if folder.size(f"{TEMPORARY}{token}/{part.name}") != part.size:
            raise InputError(
                f"`path`: a task has written {choose_path(uri, token, part.name)}, which this "
                "machine does not see: use a file system that all machines share, or a URI"
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
    """Remove the files of a failed job."""
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


def _build_name(number: int, token: str, manifest: Manifest) -> str:
    # The token makes the names of new files differ from those of the files that they replace.
    return f"part-{number:05d}-{token[:8]}.tfrecord{SUFFIX[manifest.compression]}"
