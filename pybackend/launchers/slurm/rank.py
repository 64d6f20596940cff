"""One rank of `tfdist run` in an allocation: srun starts this process, which execs the script."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from pybackend.launchers.slurm.step import group_variables


def main(*command: str) -> NoReturn:
    """Exec a command with the variables of its worker group, so that it gets Slurm's signals."""
    os.environ.update(group_variables(os.environ))
    sys.stdout.flush()
    os.execvp(command[0], command)  # noqa: S606 (the purpose)
