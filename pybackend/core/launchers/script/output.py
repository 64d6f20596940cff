"""Output of the ranks: lines labelled by rank, and files."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import IO

from pybackend.core.errors import InputError
from pybackend.core.launchers.script.agent import Stream

_LONGEST_LINE = 65536
# Interval of showing a progress bar that redraws itself.
_REDRAW_SECONDS = 1.0


class ScriptOutput:
    """Destination of the output of all ranks.

    Parameters
    ----------
    shown
        Ranks whose lines are printed; None: all.
    folder
        Folder for the unchanged output of each rank, in ``0.out``, ``0.err`` and so on.
    """

    def __init__(self, shown: Collection[int] | None = None, folder: Path | None = None) -> None:
        self._shown = shown
        self._folder = folder
        self._lines: dict[tuple[int, Stream], LineSplitter] = {}
        self._files: dict[tuple[int, Stream], IO[bytes]] = {}
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise InputError(f"cannot write to --output-dir: {error}") from error

    def shows(self, rank: int) -> bool:
        """Return whether a rank's lines are printed."""
        return self._shown is None or rank in self._shown

    def write(self, rank: int, stream: Stream, content: bytes) -> None:
        """Write output of a rank."""
        if self._folder is not None:
            self._keep(rank, stream, content)
        if self.shows(rank):
            self._print(rank, stream, self._of(rank, stream).add(content))

    def end_lines(self) -> None:
        """Print incomplete lines, because no more output follows."""
        for (rank, stream), lines in self._lines.items():
            self._print(rank, stream, lines.end())

    def close(self) -> None:
        """Close the files."""
        for file in self._files.values():
            file.close()

    def _of(self, rank: int, stream: Stream) -> LineSplitter:
        return self._lines.setdefault((rank, stream), LineSplitter())

    def _keep(self, rank: int, stream: Stream, content: bytes) -> None:
        try:
            self._file(rank, stream).write(content)
        except OSError as error:  # such as a full disk, which must not end a training run
            say(f"nothing more is written to {self._folder}: {error}")
            self._folder = None

    def _file(self, rank: int, stream: Stream) -> IO[bytes]:
        if (rank, stream) not in self._files:
            assert self._folder is not None
            # Unbuffered: the files can be followed, and are complete if the driver is killed.
            file = open(self._folder / f"{rank}.{stream}", "wb", buffering=0)  # noqa: SIM115
            self._files[rank, stream] = file
        return self._files[rank, stream]

    def _print(self, rank: int, stream: Stream, lines: list[bytes]) -> None:
        if lines:
            target = (sys.stdout if stream == "out" else sys.stderr).buffer
            target.write(b"".join(b"[%d] %s\n" % (rank, line) for line in lines))
            target.flush()


class LineSplitter:
    """Splitter that turns output that arrives in pieces into whole lines.

    A line that redraws itself with carriage returns yields its last state, as on a terminal, and
    until then one state per second.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._drawn = time.monotonic()
        self._was_shown = False

    def add(self, content: bytes) -> list[bytes]:
        """Add a piece, and return the lines that it completes."""
        *whole, self._rest = (self._rest + content).split(b"\n")
        lines = [_last_state(line) for line in whole]
        if lines and self._was_shown:  # a state of this line, which may have been its last
            lines = lines if lines[0] else lines[1:]
            self._was_shown = False
        states, _, newest = self._rest.rpartition(b"\r")
        state = _last_state(states)
        if state and time.monotonic() >= self._drawn + _REDRAW_SECONDS:
            self._rest, self._drawn, self._was_shown = newest, time.monotonic(), True
            lines.append(state)
        elif state:
            self._rest = state + b"\r" + newest
        if len(self._rest) > _LONGEST_LINE:
            lines += self.end()
        return lines

    def end(self) -> list[bytes]:
        """Return the incomplete line, if there is one."""
        rest, self._rest = _last_state(self._rest), b""
        return [rest] if rest else []


def _last_state(line: bytes) -> bytes:
    """Return the state of a redrawn line that a terminal would show."""
    return next((state for state in reversed(line.split(b"\r")) if state), b"")


def say(text: str) -> None:
    """Print a line from the driver itself."""
    print(f"tfdist: {text}", file=sys.stderr, flush=True)
