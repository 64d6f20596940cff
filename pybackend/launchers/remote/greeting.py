"""What `bootstrap` says of the Python and the machine on which it runs, as the driver reads it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from pybackend.errors import ClusterError
from pybackend.job.codec import read_fields
from pybackend.launchers.machine_share import Machine
from pybackend.launchers.remote.bootstrap import MARK


@dataclass(frozen=True)
class HostGreeting:
    """A Python: its version and path, the packages that it lacks, and what its machine has.

    ``machine`` holds the fields of a `Machine`.
    """

    version: tuple[int, ...]
    python: str
    missing: tuple[str, ...]
    machine: dict[str, Any]


def read_greeting(line: bytes, place: str) -> HostGreeting:
    """The greeting in a line that begins with `MARK`.

    Parameters
    ----------
    place
        Where it comes from, for messages.

    Raises
    ------
    ClusterError
        It is none.
    """
    try:
        said = read_fields(HostGreeting, json.loads(line[len(MARK) :]))
        read_fields(Machine, said.machine)
    except (ValueError, RecursionError) as error:
        raise ClusterError(
            f"{place} has greeted with something that makes no sense ({error}): look whether what "
            "a shell prints there at a login begins with the word tfdist"
        ) from error
    return said
