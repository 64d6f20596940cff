"""The batch script of a job: what sbatch gets, in full."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any


def batch_script(options: Mapping[str, Any], lines: Sequence[str]) -> str:
    """A script with sbatch's options in it.

    Parameters
    ----------
    options
        sbatch's long options; True for one without a value, None for none at all.
    lines
        Shell commands.
    """
    head = [
        f"#SBATCH --{name}" if value is True else f"#SBATCH --{name}={_quote(value)}"
        for name, value in options.items()
        if value is not None
    ]
    return "\n".join(["#!/bin/bash", *head, "", *lines, ""])


def srun(options: Mapping[str, Any], command: Sequence[str]) -> list[str]:
    """The command that starts one task per worker, and ends all if one fails."""
    given = {"kill-on-bad-exit": 1, "distribution": "block", "mpi": "none", **options}
    flags = [f"--{name}={value}" for name, value in given.items() if value is not None]
    return ["srun", *flags, *command]


def _quote(value: Any) -> str:
    """sbatch splits its lines in the script as a shell would."""
    return shlex.quote(str(value))
