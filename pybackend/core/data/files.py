"""Access to files and folders by path or URI, with the operations of fsspec.

`find_filesystem` is the one place where local files and others are told apart. `naming_full_disk`
and `naming_open_files` turn errors of disks and limits into advice.
"""

from __future__ import annotations

import errno
import glob
import os
import posixpath
import re
import resource
import secrets
import shutil
import stat
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pybackend.core.errors import ClusterError, InputError
from pybackend.core.words import show, show_bytes

# One path or URI, or several.
Paths = str | tuple[str, ...]
_MAGIC = re.compile(r"[*?\[]")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")
# With a password: the name alone may be a container, as in abfs://container@account.
_USER = re.compile(r"(?<=://)[^/\s:@]*:[^/\s]*@")


def is_remote(uri: str) -> bool:
    """True for storage other than this machine's file system."""
    scheme = _SCHEME.match(uri)
    return scheme is not None and scheme[1].lower() != "file"


def hide_password(text: str) -> str:
    """Replace the passwords in URIs, and their users."""
    return _USER.sub("***@", text)


def local_path(uri: str) -> str:
    return os.path.abspath(re.sub(r"^file:(//)?(?=/)", "", uri))


def as_uri(uri: str) -> str:
    """Return a local path as an absolute one, and a URI as it is."""
    return uri if is_remote(uri) else local_path(uri)


def is_path(data: Any) -> bool:
    """True also for several paths."""
    several = data if isinstance(data, (list, tuple)) and data else [data]
    return all(isinstance(one, (str, os.PathLike)) for one in several)


def as_paths(data: Any) -> Paths:
    return tuple(map(os.fspath, data)) if isinstance(data, (list, tuple)) else os.fspath(data)


def find_files(uri: Paths, name: str = "data") -> list[str]:
    """Return all data files at a path, sorted: the file itself, or those in a folder.

    Names that begin with ``_`` or ``.`` are Spark's metadata, not data. Folders are searched
    recursively. With several paths, the files are in the order of the paths. A path may be a glob
    pattern. Raises `InputError` if the path does not exist or has no files, or a file is named
    twice.
    """
    if isinstance(uri, tuple):
        found = [file for one in uri for file in find_files(one, name)]
        for file, count in Counter(found).items():
            if count > 1:
                raise InputError(f"`{name}` lists the file {show(file)} {count} times")
    elif is_pattern(uri):
        filesystem, path = find_filesystem(uri, name)
        every = [str(filesystem.unstrip_protocol(match)) for match in filesystem.glob(path)]
        matches = [match for match in every if _is_data(posixpath.basename(match.rstrip("/")))]
        if not matches:
            raise InputError(f"`{name}`: no file or folder matches {show(uri)}")
        found = sorted({file for match in matches for file in find_files(match, name)})
    else:
        found = _list_files(uri, name)
        if not found:
            raise InputError(f"`{name}`: the folder {show(uri)} has no files")
    return found


def is_pattern(uri: str) -> bool:
    """True for a glob pattern: a path that has wildcards, and is not an existing file."""
    return bool(_MAGIC.search(uri)) and (is_remote(uri) or not os.path.lexists(local_path(uri)))


def find_root(uri: str) -> str:
    """Return the folder before a path's wildcards, in the format that `find_files` uses."""
    return as_uri(_MAGIC.split(uri)[0].rpartition("/")[0] if is_pattern(uri) else uri)


def _list_files(uri: str, name: str) -> list[str]:
    """Return the file at a path, or the data files in the folder."""
    filesystem, path = find_filesystem(uri, name)
    whole, root = as_uri(uri), path.rstrip("/")
    try:
        if filesystem.isfile(path):
            return [whole]
        listed = filesystem.find(path) if filesystem.isdir(path) else None
    except Exception as error:  # each file system has its own errors
        raise InputError(f"`{name}`: {show(uri)} cannot be listed: {error}") from error
    if listed is None:
        raise InputError(f"`{name}`: there is no file or folder {show(uri)}")
    inner = [file[file.index(root) + len(root) :].strip("/") for file in listed]
    folder = Folder(whole)
    return sorted(folder.path(file) for file in inner if all(map(_is_data, file.split("/"))))


def _is_data(name: str) -> bool:
    return not name.startswith(("_", "."))


def open_file(uri: str, mode: str = "rb") -> Any:
    filesystem, path = find_filesystem(uri)
    return filesystem.open(path, mode)


def read_file(uri: str) -> bytes:
    with open_file(uri) as file:
        return bytes(file.read())


def get_size(uri: str) -> int:
    filesystem, path = find_filesystem(uri)
    return int(filesystem.size(path))


def check_folder(uri: str, argument: str) -> None:
    """Raise `InputError` if a local file's folder cannot be created or used; write nothing."""
    if is_remote(uri):
        return
    folder = _find_folder(uri)
    if os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK):
        return
    reason = f"you do not have permission to write to the folder {show(folder)}"
    if not os.path.isdir(folder):
        reason = f"{show(folder)} is not a folder"
    raise InputError(f"`{argument}`: {show(uri)} cannot be written: {reason}")


def _find_folder(uri: str) -> str:
    """Return the folder of a file, or the nearest parent that exists."""
    folder = os.path.dirname(local_path(uri))
    while not os.path.lexists(folder):
        folder = os.path.dirname(folder)
    return folder


def check_writable(uri: str, argument: str) -> None:
    """Raise `InputError` if a file cannot be written; try it with another file in its folder."""
    probe = f"{uri}.probe-{secrets.token_hex(4)}"
    try:
        if not is_remote(uri):
            probe = os.path.join(_find_folder(uri), os.path.basename(probe))
        filesystem, path = find_filesystem(probe)
        with filesystem.open(path, "wb") as file:
            file.write(b"tfdist")
        filesystem.rm(path)
    except InputError:
        raise
    except Exception as error:  # each file system has its own errors
        # Without the name of the probe.
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"`{argument}`: {show(uri)} cannot be written: {reason}") from error


def write_whole(uri: str, content: bytes) -> None:
    """Write a file under a temporary name, then rename it, so that it is never incomplete."""
    filesystem, path = find_filesystem(uri)
    partial_path = f"{path}.partial-{secrets.token_hex(4)}"
    if not is_remote(uri):
        os.makedirs(os.path.dirname(path), exist_ok=True)
    try:
        with filesystem.open(partial_path, "wb" if is_remote(uri) else "xb") as file:
            file.write(content)
        filesystem.mv(partial_path, path)
    except BaseException:
        with suppress(Exception):
            filesystem.rm(partial_path)
        raise


def find_filesystem(uri: str, name: str = "data") -> tuple[Any, str]:
    """Return the file system of a path or URI, fsspec's or `_LOCAL`, and the path in it."""
    if not is_remote(uri):
        return _LOCAL, local_path(uri)
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


class _LocalFileSystem:
    """The operations of fsspec's file systems that are used here, for local files.

    fsspec's own class is not used. It is in the extra ``data``, but workers need only Python,
    TensorFlow and this package's few dependencies to write a checkpoint. Its writes are not atomic,
    its ``mv`` copies where a rename fails, and it hides the errors of a disk that does not respond.
    """

    open = staticmethod(open)
    exists = staticmethod(os.path.lexists)
    isfile = staticmethod(os.path.isfile)
    isdir = staticmethod(os.path.isdir)
    size = staticmethod(os.path.getsize)
    makedirs = staticmethod(os.makedirs)
    mv = staticmethod(os.replace)
    rmdir = staticmethod(os.rmdir)
    glob = staticmethod(partial(glob.glob, recursive=True))
    cat_file = staticmethod(read_file)
    pipe_file = staticmethod(write_whole)

    def invalidate_cache(self) -> None:
        pass  # nothing is cached

    def unstrip_protocol(self, path: str) -> str:
        return path

    def info(self, path: str) -> dict[str, Any]:
        return {"type": "directory" if stat.S_ISDIR(os.stat(path).st_mode) else "file"}

    def ls(self, path: str, detail: bool) -> list[str]:
        return os.listdir(path)

    def find(self, path: str) -> Iterator[str]:
        for folder, folders, names in os.walk(path):
            folders[:] = filter(_is_data, folders)  # snapshots may be as large as the data
            yield from (os.path.join(folder, name) for name in names)

    def rm(self, path: str, recursive: bool = False) -> None:
        if recursive and os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            os.remove(path)


_LOCAL = _LocalFileSystem()


def open_folder(uri: str) -> Folder:
    """The folder need not exist."""
    find_filesystem(uri, "uri")  # reports errors of the URI early
    return Folder(as_uri(uri))


@dataclass(frozen=True)
class Folder:
    """Operations inside a folder; ``name`` is a file or folder in it."""

    uri: str

    def path(self, name: str) -> str:
        """Return the path of a file for the functions of `pybackend.core.data.files`."""
        return posixpath.join(self.uri.rstrip("/") or "/", name)

    def make(self) -> bool:
        """Create the folder; return whether it is new."""
        filesystem, path = find_filesystem(self.uri)
        is_new = not filesystem.isdir(path)
        filesystem.makedirs(path, exist_ok=True)
        return is_new

    def names(self) -> list[str] | None:
        """Return the names in it, sorted; None if there is no such folder."""
        filesystem, path = find_filesystem(self.uri)
        filesystem.invalidate_cache()
        try:  # isdir and isfile are also False for a disk or store that does not respond
            if filesystem.info(path)["type"] != "directory":
                return None
            listed = filesystem.ls(path, detail=False)
        except (FileNotFoundError, NotADirectoryError):
            return None
        return sorted(posixpath.basename(name.rstrip("/")) for name in listed)

    def is_file(self) -> bool:
        filesystem, path = find_filesystem(self.uri)
        return bool(filesystem.exists(path)) and not filesystem.isdir(path)

    def size(self, name: str) -> int | None:
        """Return the size of a file in bytes; None if it does not exist."""
        filesystem, path = find_filesystem(self.path(name))
        return int(filesystem.size(path)) if filesystem.isfile(path) else None

    def read(self, name: str) -> bytes | None:
        """Return a file's content; None if it does not exist."""
        filesystem, path = find_filesystem(self.path(name))
        try:
            return bytes(filesystem.cat_file(path))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a file atomically."""
        filesystem, path = find_filesystem(self.path(name))
        filesystem.makedirs(posixpath.dirname(path), exist_ok=True)
        filesystem.pipe_file(path, content)

    def move(self, name: str, new: str) -> None:
        filesystem, path = find_filesystem(self.path(name))
        filesystem.mv(path, find_filesystem(self.path(new))[1])

    def remove(self, name: str) -> None:
        """Remove a file, or a folder and its content; do nothing if it does not exist."""
        filesystem, path = find_filesystem(self.path(name))
        if filesystem.exists(path):
            filesystem.rm(path, recursive=True)

    def remove_itself(self) -> None:
        """Unless it has content."""
        if self.names() == []:
            filesystem, path = find_filesystem(self.uri)
            filesystem.rmdir(path)


@contextmanager
def naming_full_disk(folder: Path, content: str, variable: str = "TMPDIR") -> Iterator[None]:
    """Raise `ClusterError` with the path if a write to a folder fails because of a limit.

    The disk is full, the user's quota on it is used up, or a file there has the size that the
    system allows. ``content`` is a plural for the message, such as ``"rows"``; ``variable`` is the
    environment variable that names another folder.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise _describe_large_file(folder, content) from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        disk = shutil.disk_usage(folder)
        raise ClusterError(
            f"the disk that contains {folder} is full: {show_bytes(disk.free)} "
            f"of {show_bytes(disk.total)} are free, and the {content} need more. Free up space "
            f"there, or set {variable} to a folder on a larger disk"
        ) from error


def _describe_large_file(folder: Path, content: str) -> ClusterError:
    """The largest file in the folder is named: the system's error has no name."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size, default=folder)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit == resource.RLIM_INFINITY:
        return ClusterError(
            f"{largest} cannot become larger on this disk, and the {content} need more: set TMPDIR "
            "to a folder on another disk"
        )
    return ClusterError(
        f"{largest} reached the size limit for files of this process, {show_bytes(limit)}, and the "
        f"{content} need more: raise the limit before the process starts (`ulimit -f unlimited`)"
    )


@contextmanager
def naming_open_files() -> Iterator[None]:
    """Raise `ClusterError` if this process or the machine has reached its limit of open files."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise ClusterError(
            f"too many open files: the limit of this process is {most}. Close files and "
            "connections, or raise the limit before it starts (`ulimit -n 4096`)"
        ) from error
