"""Folders to write into: local ones through the system, all others through fsspec."""

from __future__ import annotations

import os
import posixpath
import shutil
from dataclasses import dataclass
from typing import Protocol

from pybackend.data.files import find_filesystem, is_remote, local_path, write_whole


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
        """Remove a file, or a folder with its content; do nothing if it does not exist."""

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
    """Folder of this machine, or mounted on it."""

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
