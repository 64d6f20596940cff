"""Checks of a model file before Keras reads it: format, digest, damage, version."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Literal

from pybackend.errors import SerializationError
from pybackend.model.archive_checks import check_archive
from pybackend.model.hdf5_checks import check_hdf5, reject_endless_file

Format = Literal["h5", "keras"]
_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_ZIP_MAGIC = b"PK\x03\x04"


def recognize_format(data: bytes) -> Format:
    """Return the format of a model file, by its first bytes."""
    if data.startswith(_HDF5_MAGIC):
        return "h5"
    if data.startswith(_ZIP_MAGIC):
        return "keras"
    raise SerializationError(
        f"these {len(data)} bytes are neither an HDF5 nor a .keras file: truncated, or not a model"
    )


def check_digest(data: bytes, expected: str) -> None:
    """Reject bytes that do not have this SHA-256."""
    found = hashlib.sha256(data).hexdigest()
    if found != expected.lower():
        raise SerializationError(
            f"the model's SHA-256 is {found}, expected {expected}: it was altered on its way"
        )


def check_file(path: Path, *, is_intact: bool) -> None:
    """Reject damaged files, hostile files and files of Keras 2.

    Parameters
    ----------
    is_intact
        Whether a digest has shown that the file is unchanged.
    """
    if path.suffix == ".h5" and not is_intact:
        reject_endless_file(path)
    try:
        if path.suffix == ".h5":
            check_hdf5(path, path.stat().st_size)
            version = _read_hdf5_version(path)
        else:
            version = check_archive(path, is_intact=is_intact)
    except SerializationError:
        raise
    except Exception as error:  # zipfile, zlib and h5py raise all kinds of errors over damage
        raise SerializationError(f"the model file is truncated or corrupted: {error}") from error
    if not version.startswith("3."):
        raise SerializationError(
            f"the file was written by Keras {version or '(unknown)'}, not Keras 3. Load it with "
            "the package that wrote it, and save it again with Keras 3, if you trust it"
        )


def _read_hdf5_version(path: Path) -> str:
    import h5py

    with h5py.File(path, "r") as file:
        if "model_config" not in file.attrs:
            raise SerializationError(
                "the HDF5 file does not hold a model: expected one written by `model_to_base64` "
                "or `model.save`, with its architecture, not only weights"
            )
        version = file.attrs.get("keras_version", "")
        return version.decode() if isinstance(version, bytes) else str(version)
