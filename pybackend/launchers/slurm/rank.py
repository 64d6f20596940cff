"""One rank of `tfdist run` in an allocation: srun starts this, and this becomes the script."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from pybackend.launchers.slurm.step import gang_variables


def main(command: Sequence[str]) -> NoReturn:
    """Become a command, with the variables of its gang; so signals from Slurm reach itself."""
    os.environ.update(gang_variables(os.environ))
    sys.stdout.flush()
    os.execvp(command[0], [*command])  # noqa: S606 (what this is for)
