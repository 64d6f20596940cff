"""What is to be written to a command that need not read it at once."""

from __future__ import annotations

import contextlib
import os
from typing import IO


class InputPipe:
    """The pipe to a command's standard input; writing to it waits for nothing."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe = pipe
        self._waiting = bytearray()
        os.set_blocking(pipe.fileno(), False)

    def fileno(self) -> int:
        """The descriptor that becomes writable when the command has read something."""
        return self._pipe.fileno()

    @property
    def is_empty(self) -> bool:
        """Whether the command's pipe has taken all that was added."""
        return not self._waiting

    def add(self, content: bytes) -> None:
        """Write what there is room for; the rest waits for `flush`."""
        was_empty = self.is_empty
        self._waiting += content
        if was_empty:
            self.flush()

    def flush(self) -> None:
        """Write what there is room for; what nobody will read any more is dropped."""
        try:
            while self._waiting:
                written = os.write(self.fileno(), self._waiting)
                del self._waiting[:written]
        except BlockingIOError:
            pass
        except BrokenPipeError:
            self._waiting.clear()

    def close(self) -> None:
        """Close the pipe; what waits is dropped."""
        self._waiting.clear()
        with contextlib.suppress(BrokenPipeError):
            self._pipe.close()
