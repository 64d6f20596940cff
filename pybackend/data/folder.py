"""A folder to write into: of this machine by the system, all others through fsspec."""

from __future__ import annotations

import os
import posixpath
import shutil
from dataclasses import dataclass
from typing import Protocol

from pybackend.data.files import find_filesystem, is_remote, local_path, write_whole


class Folder(Protocol):
    """What is done inside a folder; names are those of files and folders in it."""

    def make(self) -> bool:
        """Make it, and say whether it was not there before."""

    def names(self) -> list[str] | None:
        """The names in it, sorted; None if there is no such folder."""

    def is_file(self) -> bool:
        """Whether there is a file in its place."""

    def path(self, name: str) -> str:
        """The path of a file, as `pybackend.data.files` takes it."""

    def size(self, name: str) -> int | None:
        """Bytes of a file; None if there is none."""

    def read(self, name: str) -> bytes | None:
        """A file's content; None if there is none."""

    def write(self, name: str, content: bytes) -> None:
        """Write or replace a file at one stroke."""

    def move(self, name: str, new: str) -> None:
        """Give a file another place inside."""

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with everything in it; nothing if there is none."""

    def remove_itself(self) -> None:
        """Remove the folder if it is empty."""


def open_folder(uri: str) -> Folder:
    """The folder at a path or URI, which need not exist."""
    if not is_remote(uri):
        return LocalFolder(local_path(uri))
    find_filesystem(uri, "uri")  # its errors come before any other
    return RemoteFolder(uri)


@dataclass(frozen=True)
class LocalFolder:
    """A folder of this machine, or one that it has mounted; see `Folder`."""

    root: str

    def make(self) -> bool:
        is_new = not os.path.isdir(self.root)
        os.makedirs(self.root, exist_ok=True)
        return is_new

    def names(self) -> list[str] | None:
        # Not os.path.isdir: it says False of a disk that does not answer, too.
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
    """A folder of any file system that fsspec knows; see `Folder`."""

    uri: str

    def make(self) -> bool:
        filesystem, path = find_filesystem(self.uri)
        is_new = not filesystem.isdir(path)
        filesystem.makedirs(path, exist_ok=True)
        return is_new

    def names(self) -> list[str] | None:
        filesystem, path = find_filesystem(self.uri)
        filesystem.invalidate_cache()
        try:  # isdir and isfile say False of a store that does not answer, too
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
