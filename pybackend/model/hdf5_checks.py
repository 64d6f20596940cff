"""Checks of HDF5 files that loop forever, link to other files, or claim more than they hold."""

from __future__ import annotations

import inspect
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

from pybackend.errors import SerializationError
from pybackend.model import hdf5_walk

# Reads all names and attributes, as Keras will. Many texts of an attribute may lie in one place, so
# that only reading them shows their size.
_TRIAL = """
import sys
sys.path[:] = [folder for folder in sys.path if folder]  # without the current folder
import os, resource
import h5py
path, too_much, source = sys.argv[1], int(sys.argv[2]), sys.argv[3]
exec(source)
if os.path.exists("/proc/self/statm"):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limit = used + (256 << 20) + 8 * os.path.getsize(path)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    with h5py.File(path, "r") as file:
        dict(file.attrs)
        for _, item in walk(file):
            if item is not None:
                dict(item.attrs)
except Exception as error:
    is_memory = isinstance(error, MemoryError) or "allocation failed" in str(error)
    sys.exit(too_much if is_memory else 1)
"""
_TRIAL_SECONDS = 20.0
_TOO_MUCH = 3
# Weights hardly shrink when they are compressed; HDF5's filters could inflate a thousandfold.
_MOST_INFLATION = 100
_SMALL_BYTES = 1 << 20
# Characters of a name, in errors.
_SHOWN = 200


def reject_endless_file(path: Path) -> None:
    """Reject an HDF5 file in which the HDF5 library would loop forever, or fill the memory.

    Another process reads it, because only then can such a loop be ended. Not needed if a digest
    has shown the file to be intact; reading itself finds other damage.
    """
    try:
        tried = subprocess.run(
            [sys.executable, "-c", _TRIAL, str(path), str(_TOO_MUCH), inspect.getsource(hdf5_walk)],
            capture_output=True,
            timeout=_TRIAL_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SerializationError(
            f"the model file is corrupted: reading it did not end within {_TRIAL_SECONDS:g} s"
        ) from error
    if tried.returncode < 0:
        raise SerializationError(
            "the model file is corrupted: the process that tried to read it crashed (signal "
            f"{-tried.returncode}). Copy or save it again"
        )
    if tried.returncode == _TOO_MUCH:
        raise SerializationError(
            "the model file was made by hand: its names and settings would take far more memory "
            "than the file has bytes. Do not load it, and ask its author for another"
        )


def check_hdf5(file: Path | BinaryIO, size: int) -> None:
    """Reject an HDF5 file that refers to other files, or would fill the memory when it is read.

    No values are read: links, storage and claimed sizes are in the headers.

    Parameters
    ----------
    file, size
        The file, or its content, and its number of bytes.

    Raises
    ------
    SerializationError
        Names the object: a soft or external link, external storage, a virtual data set, values of
        variable length, or more bytes than the file can hold.
    """
    import h5py

    with h5py.File(file, "r") as opened:
        try:
            claimed = sum(_check_object(*found) for found in hdf5_walk.walk(opened))
        except RecursionError as error:
            raise _hostile([b"/"], str(error)) from None
    check_total(claimed, size)


def check_total(claimed: int, size: int) -> None:
    """Reject a file of ``size`` bytes that claims to hold far more bytes."""
    if claimed > _SMALL_BYTES + _MOST_INFLATION * size:
        raise SerializationError(
            f"the model file claims to hold {claimed:,} bytes of values, but has {size:,} bytes "
            "itself: do not load it, and ask its author for another"
        )


def _check_object(path: list[bytes], item: Any) -> int:
    """Return the number of bytes that an object claims to hold."""
    import h5py

    if item is None:
        raise _hostile(path, "is a link to another place")
    if not isinstance(item, h5py.Dataset):
        return 0
    if item.external:
        raise _hostile(path, "stores its values in another file")
    if item.is_virtual:
        raise _hostile(path, "takes its values from other data sets")
    if item.dtype.hasobject:  # many values may lie in one place: their size is unknown
        raise _hostile(path, "has values of variable length")
    return int(math.prod(item.shape or ()) * item.dtype.itemsize)


def _hostile(path: list[bytes], what: str) -> SerializationError:
    name = b"/".join(path).decode(errors="replace")[:_SHOWN]
    return SerializationError(
        f"the model file was made by hand: {name!r} {what}; expected weights that lie in the file "
        "itself. Do not load it, and ask its author for another"
    )
