"""Parse the greeting from `bootstrap`, which describes its Python and its machine."""

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
    """Version, path, missing packages and machine of a Python installation.

    ``machine`` holds the fields of a `Machine`.
    """

    version: tuple[int, ...]
    python: str
    missing: tuple[str, ...]
    machine: dict[str, Any]


def read_greeting(line: bytes, place: str) -> HostGreeting:
    """Parse a line that begins with `MARK`.

    Parameters
    ----------
    place
        Name of the sender's host, for messages.

    Raises
    ------
    ClusterError
        The line is not a greeting.
    """
    try:
        said = read_fields(HostGreeting, json.loads(line[len(MARK) :]))
        read_fields(Machine, said.machine)
    except (ValueError, RecursionError) as error:
        raise ClusterError(
            f"{place} sent an invalid greeting ({error}): check whether a login shell there prints "
            "a line that begins with the word tfdist"
        ) from error
    return said
