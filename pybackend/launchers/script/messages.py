"""What the driver of `tfdist run` and its agents say to each other: one line of JSON each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pybackend.job.codec import decode, encode
from pybackend.launchers.script.command import ScriptCommand

Stream = Literal["out", "err"]
LONGEST_READ = 65536


@dataclass(frozen=True)
class Prepare:
    """Look whether the script can run, and hold ports.

    Attributes
    ----------
    folder
        In which the script runs.
    ranks
        That run on this host.
    reserves
        Whether a port is held for each of them; else their addresses are known already.
    host
        The address at which they are reached; None: the one that ssh has come to.
    temporary
        Their TMPDIR, if the user has named one.
    """

    script: ScriptCommand
    folder: str
    ranks: tuple[int, ...]
    reserves: bool = True
    host: str | None = None
    temporary: str | None = None


@dataclass(frozen=True)
class Ready:
    """The agent reads orders; none may be sent before."""


@dataclass(frozen=True)
class Prepared:
    """The ``host:port`` held for each rank."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class CannotRun:
    """The script cannot run on this host."""

    reason: str


@dataclass(frozen=True)
class StartRanks:
    """Start the ranks, each with these variables besides the host's own."""

    variables: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Deliver:
    """Send a signal to all ranks; SIGKILL also to all that they have started."""

    signal: int


@dataclass(frozen=True)
class Printed:
    """What a rank has printed: bytes, as Latin-1 text."""

    rank: int
    stream: Stream
    text: str


@dataclass(frozen=True)
class Ended:
    """A rank has ended: its exit status, or the negative number of a signal."""

    rank: int
    status: int


Order = Prepare | StartRanks | Deliver
Answer = Ready | Prepared | CannotRun | Printed | Ended


def line_of(message: Order | Answer) -> bytes:
    """The message as a line."""
    return encode(message).encode() + b"\n"


def read_order(line: bytes) -> Order:
    """What the driver wants; `ValueError` if the line is none of its messages."""
    order: Order = decode(line, *get_args(Order))
    return order


def read_answer(line: bytes) -> Answer:
    """What an agent says; `ValueError` if the line is none of its messages."""
    answer: Answer = decode(line, *get_args(Answer))
    return answer
