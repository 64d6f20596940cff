"""Results of trials, with their model files on disk instead of in memory."""

from __future__ import annotations

import os
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pybackend.core.api.train_result import TrainResult


@dataclass(frozen=True, eq=False)
class StoredResult:
    """Result of a trial, without its model file. A pickle of it has the file.

    Attributes
    ----------
    result
        The result, with an empty ``content``.
    read
        Returns the content.
    """

    result: TrainResult
    read: Callable[[], bytes]

    def load(self) -> TrainResult:
        """Return the whole result."""
        return replace(self.result, content=self.read())

    def __reduce__(self) -> Any:
        return _keep, (self.load(),)


class ModelFiles:
    """Model files of all trials of a call, in one temporary file without a name.

    The system deletes it when nothing uses it any more, even if this process is killed.
    """

    def __init__(self) -> None:
        file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (as long as this object)
        self._number = file.fileno()
        self._end = 0
        weakref.finalize(self, file.close)

    def store(self, result: TrainResult) -> StoredResult:
        """Write the model file to disk; if there is too little space, it stays in memory."""
        try:
            begin = self._write(result.content)
        except OSError:
            return _keep(result)
        read = partial(self._read, begin, len(result.content))
        return StoredResult(replace(result, content=b""), read)

    def _write(self, content: bytes) -> int:
        begin, left = self._end, memoryview(content)
        place = begin
        while left:  # a system call writes at most 2 GB
            written = os.pwrite(self._number, left, place)
            left, place = left[written:], place + written
        self._end = place
        return begin

    def _read(self, begin: int, size: int) -> bytes:
        found = os.pread(self._number, size, begin)
        while len(found) < size:
            found += os.pread(self._number, size - len(found), begin + len(found))
        return found


def _keep(result: TrainResult) -> StoredResult:
    """Return a result with its model file in memory."""
    return StoredResult(replace(result, content=b""), partial(bytes, result.content))
