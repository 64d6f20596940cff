"""Messages between the driver of `tfdist run` and its agents: one line of JSON each."""

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
    """Check that the script can run, and reserve ports.

    Attributes
    ----------
    folder
        Working directory of the script.
    ranks
        Ranks on this host.
    reserves
        True if a port is reserved for each rank; else their addresses are already known.
    host
        Address of this host for other ranks; None: the address that ssh used.
    temporary
        Their TMPDIR, if the user set it.
    """

    script: ScriptCommand
    folder: str
    ranks: tuple[int, ...]
    reserves: bool = True
    host: str | None = None
    temporary: str | None = None


@dataclass(frozen=True)
class Ready:
    """The agent reads orders from now on; none may be sent before."""


@dataclass(frozen=True)
class Prepared:
    """The ``host:port`` reserved for each rank."""

    addresses: tuple[str, ...]


@dataclass(frozen=True)
class CannotRun:
    """The script cannot run on this host."""

    reason: str


@dataclass(frozen=True)
class StartRanks:
    """Start the ranks, each with these variables in addition to the host's own."""

    variables: tuple[Mapping[str, str], ...]


@dataclass(frozen=True)
class Deliver:
    """Send a signal to all ranks; SIGKILL also to their descendants."""

    signal: int


@dataclass(frozen=True)
class Printed:
    """Output of a rank: bytes, as Latin-1 text."""

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
    """Encode a message as a line."""
    return encode(message).encode() + b"\n"


def read_order(line: bytes) -> Order:
    """Parse an order of the driver; `ValueError` if the line is invalid."""
    order: Order = decode(line, *get_args(Order))
    return order


def read_answer(line: bytes) -> Answer:
    """Parse an answer of an agent; `ValueError` if the line is invalid."""
    answer: Answer = decode(line, *get_args(Answer))
    return answer
