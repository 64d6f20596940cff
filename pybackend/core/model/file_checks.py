"""Checks of a model file before Keras reads it: format, bounds, digest, version."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Literal

from pybackend.core.errors import SerializationError
from pybackend.core.words import show, term

# Reads all names and attributes, as Keras will. Many texts of an attribute may lie in one place, so
# that only reading them shows their size.
_PROBE = """
from __future__ import annotations
import sys
sys.path[:] = [folder for folder in sys.path if folder]  # without the current folder
import os, resource
import h5py
path, too_much = sys.argv[1], int(sys.argv[2])
SOURCE_OF_WALK
if os.path.exists("/proc/self/statm"):
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    limit = used + (256 << 20) + 8 * os.path.getsize(path)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    with h5py.File(path, "r") as file:
        dict(file.attrs)
        for _, item in _walk(file):
            if item is not None:
                dict(item.attrs)
except Exception as error:
    is_memory = isinstance(error, MemoryError) or "allocation failed" in str(error)
    sys.exit(too_much if is_memory else 1)
"""
_PROBE_SECONDS = 20.0
_TOO_MUCH = 3
# Weights hardly shrink when they are compressed; HDF5's filters could inflate a thousandfold.
_MOST_INFLATION = 100
_SMALL_BYTES = 1 << 20
# Characters of a name, in errors.
_SHOWN = 200


def _walk(file: Any) -> Iterator[tuple[list[bytes], Any]]:
    """Yield the path of each object in an open ``h5py.File``, as names, and the object.

    Each object comes once, with None in place of a link. Raises `RecursionError` if groups are
    nested more than 100 deep; a nested Keras model takes two groups per level.
    """
    # HDF5 itself visits objects recursively and builds each one's whole path: it crashes, or takes
    # minutes, with thousands of nested groups. `_PROBE` contains the text of this function, so it
    # uses nothing of this module.
    import h5py

    deepest = 100
    kinds = {
        h5py.h5i.GROUP: h5py.Group,
        h5py.h5i.DATASET: h5py.Dataset,
        h5py.h5i.DATATYPE: h5py.Datatype,
    }
    seen = {h5py.h5o.get_info(file.id).addr}
    left: list[tuple[list[bytes], Any]] = [([], file.id)]
    while left:
        above, group = left.pop()
        if len(above) > deepest:
            raise RecursionError(f"has groups nested more than {deepest} deep")
        names: list[bytes] = []
        group.links.iterate(names.append)
        for name in names:
            path = [*above, name]
            if group.links.get_info(name).type != h5py.h5l.TYPE_HARD:
                yield path, None
                continue
            opened = h5py.h5o.open(group, name)
            address = h5py.h5o.get_info(opened).addr
            if address in seen:  # one object may have many names, its own groups among them
                continue
            seen.add(address)
            kind = h5py.h5i.get_type(opened)
            if kind == h5py.h5i.GROUP:
                left.append((path, opened))
            yield path, kinds[kind](opened)


def reject_endless_file(path: Path) -> None:
    """Reject an HDF5 file in which the HDF5 library would loop forever, or fill the memory.

    A separate process reads it, because only then can such a loop be stopped. Not needed if a
    digest has shown that the file is intact. Other damage is detected when the file is read.
    """
    program = _PROBE.replace("SOURCE_OF_WALK", inspect.getsource(_walk))
    try:
        tried = subprocess.run(
            [sys.executable, "-c", program, str(path), str(_TOO_MUCH)],
            capture_output=True,
            timeout=_PROBE_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise SerializationError(
            f"the model file is corrupted: reading it did not finish within {_PROBE_SECONDS:g} s"
        ) from error
    if tried.returncode < 0:
        raise SerializationError(
            "the model file is corrupted: the process that tried to read it crashed (signal "
            f"{-tried.returncode}). Copy or save it again"
        )
    if tried.returncode == _TOO_MUCH:
        raise SerializationError(
            "the model file was hand-crafted: its names and settings would take far more memory "
            "than the file has bytes. Do not load it, and ask its author for a new one"
        )


def check_hdf5(file: Path | BinaryIO, size: int) -> None:
    """Reject an HDF5 file that refers to other files, or would fill the memory when read.

    No values are read: links, storage and claimed sizes are in the headers. ``size`` is the number
    of bytes of the file. Rejected are soft and external links, external storage, virtual data sets,
    values of variable length, and more bytes than the file can hold.
    """
    import h5py

    with h5py.File(file, "r") as opened:
        try:
            claimed = sum(_check_object(*found) for found in _walk(opened))
        except RecursionError as error:
            raise _hostile([b"/"], str(error)) from None
    check_total(claimed, size)


def check_total(claimed: int, size: int) -> None:
    """Reject a file of ``size`` bytes that claims to hold far more bytes."""
    if claimed > _SMALL_BYTES + _MOST_INFLATION * size:
        raise SerializationError(
            f"the model file claims to contain {claimed:,} bytes of values, but has {size:,} "
            "bytes itself: do not load it, and ask its author for a new one"
        )


def _check_object(path: list[bytes], item: Any) -> int:
    """Return the number of bytes that an object claims to hold."""
    import h5py

    if item is None:
        raise _hostile(path, "is a link to another location")
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
        f"the model file was hand-crafted: {show(name)} {what}; expected weights that lie in the "
        "file itself. Do not load it, and ask its author for a new one"
    )


_METADATA, _CONFIG, _WEIGHTS = "metadata.json", "config.json", "model.weights.h5"
_METADATA_BYTES = 1 << 20


def check_archive(path: Path, *, is_intact: bool) -> str:
    """Reject a hostile or damaged archive; return the version of Keras that wrote it.

    Sizes are compared before anything is unpacked. `zipfile` never unpacks more of a member than
    the archive's directory states.
    """
    size = path.stat().st_size
    with zipfile.ZipFile(path) as archive:
        _check_directory(archive, size)
        # Each member is read once: the weights may have gigabytes.
        for name in set(archive.namelist()) - {_WEIGHTS}:
            _read_member(archive, name)
        content = _read_member(archive, _WEIGHTS)
        if not is_intact:
            with tempfile.NamedTemporaryFile(prefix="tfdist-", suffix=".h5") as file:
                file.write(content)
                file.flush()
                reject_endless_file(Path(file.name))
        check_hdf5(BytesIO(content), size)
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
                f"the .keras file has {show(member.filename)} compressed by method "
                f"{member.compress_type}; expected none or deflate, as Keras and zip write it"
            )
    check_total(sum(member.file_size for member in members), size)
    metadata = archive.getinfo(_METADATA).file_size
    if metadata > _METADATA_BYTES:
        raise SerializationError(
            f"the .keras file has {metadata:,} bytes in {show(_METADATA)}; expected "
            f"{_METADATA_BYTES:,} at most: do not load it, and ask its author for a new one"
        )


def _read_member(archive: zipfile.ZipFile, name: str) -> bytes:
    try:
        return archive.read(name)  # which compares its checksum
    except zipfile.BadZipFile as error:
        raise _damaged(name) from error


def _damaged(name: str) -> SerializationError:
    return SerializationError(f"the .keras file is damaged at {show(name)}")


Format = Literal["h5", "keras"]
_HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
_ZIP_MAGIC = b"PK\x03\x04"


def recognize_format(data: bytes) -> Format:
    if data.startswith(_HDF5_MAGIC):
        return "h5"
    if data.startswith(_ZIP_MAGIC):
        return "keras"
    raise SerializationError(
        f"these {len(data)} bytes are neither an HDF5 nor a .keras file: truncated, or not a model"
    )


def check_digest(data: bytes, expected: str) -> None:
    found = hashlib.sha256(data).hexdigest()
    if found != expected.lower():
        raise SerializationError(
            f"the model's SHA-256 is {found}, expected {expected}: it was altered in transit"
        )


def check_file(path: Path, *, is_intact: bool) -> None:
    """Reject damaged files, hostile files and files written by Keras 2.

    ``is_intact``: a digest has shown that the file is unchanged.
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
                "the HDF5 file does not contain a model: expected one written by "
                f"`model_to_base64` or `{term('model.save')}`, with its architecture, not only "
                "weights"
            )
        version = file.attrs.get("keras_version", "")
        return version.decode() if isinstance(version, bytes) else str(version)
