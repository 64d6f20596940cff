"""Checks of ``.keras`` archives that are damaged, incomplete, or larger than they look."""

from __future__ import annotations

import json
import tempfile
import zipfile
from io import BytesIO
from pathlib import Path

from pybackend.errors import SerializationError
from pybackend.model.hdf5_checks import check_hdf5, check_total, reject_endless_file

_METADATA, _CONFIG, _WEIGHTS = "metadata.json", "config.json", "model.weights.h5"
_METADATA_BYTES = 1 << 20
_BLOCK = 1 << 20


def check_archive(path: Path, *, is_intact: bool) -> str:
    """Reject a hostile or damaged archive; return the version of Keras that wrote it.

    Sizes are compared before anything is unpacked. `zipfile` never unpacks more of a member than
    the archive's directory states.

    Parameters
    ----------
    is_intact
        As in `check_file`.

    Raises
    ------
    SerializationError
        Names the member that is missing, damaged, compressed by another method than Keras's, or
        larger than it may be; for the weights also as `check_hdf5`.
    """
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        _check_directory(archive, size)
        for name in archive.namelist():
            if name == _WEIGHTS:
                _check_weights(archive, size, is_intact)
            else:
                _check_member(archive, name)
        return str(json.loads(archive.read(_METADATA))["keras_version"])


def _check_directory(archive: zipfile.ZipFile, size: int) -> None:
    members, names = archive.infolist(), archive.namelist()
    for name in (_CONFIG, _METADATA, _WEIGHTS):
        # A member with a thousand entries would be read a thousand times.
        if name not in names or len(set(names)) < len(names):
            raise _damaged(name)
    for member in members:
        # Other methods unpack thousands of bytes from one, regardless of the requested size.
        if member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise SerializationError(
                f"the .keras file has {member.filename!r} compressed by method "
                f"{member.compress_type}; expected none or deflate, as Keras and zip write it"
            )
    check_total(sum(member.file_size for member in members), size)
    metadata = archive.getinfo(_METADATA).file_size
    if metadata > _METADATA_BYTES:
        raise SerializationError(
            f"the .keras file has {metadata:,} bytes in {_METADATA!r}; expected {_METADATA_BYTES:,}"
            " at most: do not load it, and ask its author for another"
        )


def _check_weights(archive: zipfile.ZipFile, size: int, is_intact: bool) -> None:
    try:
        content = archive.read(_WEIGHTS)
    except zipfile.BadZipFile as error:
        raise _damaged(_WEIGHTS) from error
    if not is_intact:
        with tempfile.NamedTemporaryFile(prefix="tfdist-", suffix=".h5") as file:
            file.write(content)
            file.flush()
            reject_endless_file(Path(file.name))
    check_hdf5(BytesIO(content), size)


def _check_member(archive: zipfile.ZipFile, name: str) -> None:
    try:
        with archive.open(name) as member:
            while member.read(_BLOCK):  # its checksum is compared at the end
                pass
    except zipfile.BadZipFile as error:
        raise _damaged(name) from error


def _damaged(name: str) -> SerializationError:
    return SerializationError(f"the .keras file is damaged at {name!r}")
