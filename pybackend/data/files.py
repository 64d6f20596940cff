"""Access to files and folders by path or URI: local ones directly, others through fsspec."""

from __future__ import annotations

import glob
import os
import posixpath
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol

from pybackend.errors import InputError
from pybackend.words import show

# One path or URI, or several.
Places = str | tuple[str, ...]
_MAGIC = re.compile(r"[*?\[]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
# With a password: the name alone may be a container, as in abfs://container@account.
_USER = re.compile(r"(?<=://)[^/\s:@]*:[^/\s]*@")


def is_remote(uri: str) -> bool:
    """Return whether a URI refers to storage other than this machine's file system."""
    scheme = _SCHEME.match(uri)
    return scheme is not None and scheme[1].lower() != "file"


def hide_password(text: str) -> str:
    """Return a text whose URIs show neither a password nor its user."""
    return _USER.sub("***@", text)


def local_path(uri: str) -> str:
    """Return the absolute path of a local file."""
    return os.path.abspath(re.sub(r"^file:(//)?(?=/)", "", uri))


def is_path(data: Any) -> bool:
    """Return whether the data is a path, or several paths."""
    several = data if isinstance(data, (list, tuple)) and data else [data]
    return all(isinstance(one, (str, os.PathLike)) for one in several)


def as_places(data: Any) -> Places:
    """Convert a path or URI, or several, to text."""
    return tuple(map(os.fspath, data)) if isinstance(data, (list, tuple)) else os.fspath(data)


def find_files(uri: Places, name: str = "data") -> list[str]:
    """Return all data files at a path, sorted: the file itself, or those in a folder.

    Names that begin with ``_`` or ``.`` are Spark's metadata, not data. Folders are searched
    recursively. With several paths, the files are in the order of the paths. A path may be a glob
    pattern.

    Raises
    ------
    InputError
        The path does not exist or has no files, or a file is named twice.
    """
    if isinstance(uri, tuple):
        found = [file for one in uri for file in find_files(one, name)]
        for file, count in Counter(found).items():
            if count > 1:
                raise InputError(f"`{name}` lists the file {show(file)} {count} times")
        return found
    if is_pattern(uri):
        matches = _match(uri, name)
        if not matches:
            raise InputError(f"`{name}`: no file or folder matches {show(uri)}")
        return sorted({file for match in matches for file in find_files(match, name)})
    files = _find_remote_files(uri, name) if is_remote(uri) else _find_local_files(local_path(uri))
    if files is None:
        raise InputError(f"`{name}`: there is no file or folder {show(uri)}")
    if not files:
        raise InputError(f"`{name}`: the folder {show(uri)} has no files")
    return files


def is_pattern(uri: str) -> bool:
    """Return whether a path is a glob pattern: it has wildcards, and is not an existing file."""
    return bool(_MAGIC.search(uri)) and (is_remote(uri) or not os.path.lexists(local_path(uri)))


def find_root(uri: str) -> str:
    """Return the folder before a path's wildcards, in the format that `find_files` uses."""
    root = _MAGIC.split(uri)[0].rpartition("/")[0] if is_pattern(uri) else uri
    return root if is_remote(root) else local_path(root)


def _match(uri: str, name: str) -> list[str]:
    """Return the matches of a pattern, without Spark's metadata."""
    if is_remote(uri):
        filesystem, path = find_filesystem(uri, name)
        found = [str(filesystem.unstrip_protocol(match)) for match in filesystem.glob(path)]
    else:
        found = glob.glob(local_path(uri), recursive=True)
    return [match for match in found if _is_data(posixpath.basename(match.rstrip("/")))]


def open_file(uri: str, mode: str = "rb") -> Any:
    """Open a binary file; fsspec opens URIs."""
    if not is_remote(uri):
        return open(local_path(uri), mode)
    filesystem, path = find_filesystem(uri)
    return filesystem.open(path, mode)


def read_file(uri: str) -> bytes:
    """Return the content of a file."""
    with open_file(uri) as file:
        return bytes(file.read())


def get_size(uri: str) -> int:
    """Return the size of a file in bytes."""
    if not is_remote(uri):
        return os.path.getsize(local_path(uri))
    filesystem, path = find_filesystem(uri)
    return int(filesystem.size(path))


def check_folder(uri: str, argument: str) -> None:
    """Raise an error if a local file's folder cannot be created or written to; write nothing.

    Raises
    ------
    InputError
        Names the argument and the folder.
    """
    if is_remote(uri):
        return
    folder = _find_folder(uri)
    if not os.path.isdir(folder):
        raise InputError(
            f"`{argument}`: {show(uri)} cannot be written: {show(folder)} is not a folder"
        )
    if not os.access(folder, os.W_OK | os.X_OK):
        raise InputError(
            f"`{argument}`: {show(uri)} cannot be written: you do not have permission to write to "
            f"the folder {show(folder)}"
        )


def _find_folder(uri: str) -> str:
    """Return the folder of a file, or the nearest parent that exists."""
    folder = os.path.dirname(local_path(uri))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return folder


def check_writable(uri: str, argument: str) -> None:
    """Check that a file can be written, by writing and removing another file in its folder.

    Raises
    ------
    InputError
        It cannot be written. The message names the argument.
    """
    probe = f"{uri}.probe-{secrets.token_hex(4)}"
    try:
        if not is_remote(uri):
            probe = os.path.join(_find_folder(uri), os.path.basename(probe))
        with open_file(probe, "wb") as file:
            file.write(b"tfdist")
        remove_file(probe)
    except InputError:
        raise
    except Exception as error:  # each file system has its own errors
        # Without the name of the probe.
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"`{argument}`: {show(uri)} cannot be written: {reason}") from error


def write_whole(uri: str, content: bytes) -> None:
    """Write a file under a temporary name, then rename it, so that it is never incomplete."""
    partial = f"{uri}.partial-{secrets.token_hex(4)}"
    if not is_remote(uri):
        os.makedirs(os.path.dirname(local_path(uri)), exist_ok=True)
    try:
        with open_file(partial, "wb" if is_remote(uri) else "xb") as file:
            file.write(content)
        if is_remote(uri):
            filesystem, path = find_filesystem(uri)
            filesystem.mv(find_filesystem(partial)[1], path)
        else:
            os.replace(local_path(partial), local_path(uri))
    except BaseException:
        with suppress(Exception):
            remove_file(partial)
        raise


def remove_file(uri: str) -> None:
    """Remove a file."""
    if not is_remote(uri):
        os.remove(local_path(uri))
        return
    filesystem, path = find_filesystem(uri)
    filesystem.rm(path)


def find_filesystem(uri: str, name: str = "data") -> tuple[Any, str]:
    """Return the fsspec file system of a URI, and the path in it."""
    try:
        import fsspec
    except ImportError as error:
        raise InputError(
            f"`{name}`: reading {show(uri)} needs the Python package fsspec, and the package for "
            "its scheme"
        ) from error
    try:
        filesystem, path = fsspec.core.url_to_fs(uri)
    except (ValueError, ImportError) as error:
        message = f"`{name}`: {show(uri)} cannot be opened: {error}"
        raise InputError(hide_password(message)) from error
    return filesystem, path


def _find_local_files(path: str) -> list[str] | None:
    if os.path.isfile(path):
        return [path]
    if not os.path.isdir(path):
        return None
    files = []
    for folder, folders, names in os.walk(path):
        folders[:] = [name for name in folders if _is_data(name)]
        files += [os.path.join(folder, name) for name in names if _is_data(name)]
    return sorted(files)


def _find_remote_files(uri: str, name: str) -> list[str] | None:
    filesystem, path = find_filesystem(uri, name)
    try:
        if filesystem.isfile(path):
            return [uri]
        if not filesystem.isdir(path):
            return None
        listed: Sequence[str] = filesystem.find(path)
    except InputError:
        raise
    except Exception as error:  # each file system has its own errors
        raise InputError(f"`{name}`: {show(uri)} cannot be listed: {error}") from error
    root = path.rstrip("/")
    inner = [file[file.index(root) + len(root) :].strip("/") for file in listed]
    return sorted(
        posixpath.join(uri.rstrip("/"), file)
        for file in inner
        if all(_is_data(part) for part in file.split("/"))
    )


def _is_data(name: str) -> bool:
    return not name.startswith(("_", "."))


class Folder(Protocol):
    """Operations inside a folder; ``name`` is a file or folder in it."""

    def make(self) -> bool:
        """Create the folder; return whether it is new."""

    def names(self) -> list[str] | None:
        """Return the names in it, sorted; None if there is no such folder."""

    def is_file(self) -> bool:
        """Return whether its path is a file."""

    def path(self, name: str) -> str:
        """Return the path of a file for the functions of `pybackend.data.files`."""

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None if it does not exist."""

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a file atomically."""

    def move(self, name: str, new: str) -> None:
        """Rename a file within the folder."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder and its content; do nothing if it does not exist."""

    def remove_itself(self) -> None:
        """Remove the folder if it is empty."""


def open_folder(uri: str) -> Folder:
    """Return the folder at a path or URI, which need not exist."""
    if not is_remote(uri):
        return LocalFolder(local_path(uri))
    find_filesystem(uri, "uri")  # reports errors of the URI early
    return RemoteFolder(uri)


@dataclass(frozen=True)
class LocalFolder:
    """Folder on this machine, or mounted on it."""

    root: str

    def make(self) -> bool:
        is_new = not os.path.isdir(self.root)
        os.makedirs(self.root, exist_ok=True)
        return is_new

    def names(self) -> list[str] | None:
        # Not os.path.isdir: it is also False for a disk that does not respond.
        try:
            return sorted(os.listdir(self.root))
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_file(self) -> bool:
        return os.path.exists(self.root) and not os.path.isdir(self.root)

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def size(self, name: str) -> int | None:
        path = self.path(name)
        return os.path.getsize(path) if os.path.isfile(path) else None

    def read(self, name: str) -> bytes | None:
        try:
            with open(self.path(name), "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def write(self, name: str, content: bytes) -> None:
        write_whole(self.path(name), content)

    def move(self, name: str, new: str) -> None:
        os.replace(self.path(name), self.path(new))

    def remove(self, name: str) -> None:
        path = self.path(name)
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.lexists(path):
            os.remove(path)

    def remove_itself(self) -> None:
        if self.names() == []:
            os.rmdir(self.root)


@dataclass(frozen=True)
class RemoteFolder:
    """Folder of a file system that fsspec supports."""

    uri: str

    def make(self) -> bool:
        filesystem, path = find_filesystem(self.uri)
        is_new = not filesystem.isdir(path)
        filesystem.makedirs(path, exist_ok=True)
        return is_new

    def names(self) -> list[str] | None:
        filesystem, path = find_filesystem(self.uri)
        filesystem.invalidate_cache()
        try:  # isdir and isfile are also False for a store that does not respond
            if filesystem.info(path)["type"] != "directory":
                return None
            listed = filesystem.ls(path, detail=False)
        except FileNotFoundError:
            return None
        return sorted(posixpath.basename(name.rstrip("/")) for name in listed)

    def is_file(self) -> bool:
        filesystem, path = find_filesystem(self.uri)
        return bool(filesystem.isfile(path))

    def path(self, name: str) -> str:
        return posixpath.join(self.uri.rstrip("/"), name)

    def size(self, name: str) -> int | None:
        filesystem, path = find_filesystem(self.path(name))
        return int(filesystem.size(path)) if filesystem.isfile(path) else None

    def read(self, name: str) -> bytes | None:
        filesystem, path = find_filesystem(self.path(name))
        try:
            return bytes(filesystem.cat_file(path))
        except (FileNotFoundError, IsADirectoryError):
            return None

    def write(self, name: str, content: bytes) -> None:
        filesystem, path = find_filesystem(self.path(name))
        filesystem.makedirs(posixpath.dirname(path), exist_ok=True)
        filesystem.pipe_file(path, content)

    def move(self, name: str, new: str) -> None:
        filesystem, path = find_filesystem(self.path(name))
        filesystem.mv(path, find_filesystem(self.path(new))[1])

    def remove(self, name: str) -> None:
        filesystem, path = find_filesystem(self.path(name))
        if filesystem.exists(path):
            filesystem.rm(path, recursive=True)

    def remove_itself(self) -> None:
        if self.names() == []:
            filesystem, path = find_filesystem(self.uri)
            filesystem.rmdir(path)
