"""Environments of Python that do not have some packages."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path


def python_without(folder: Path, pattern: str) -> Path:
    """A Python that has the packages of this one, except those whose files match a pattern."""
    venv.create(folder / "env", symlinks=True)
    (site,) = folder.glob("env/lib/python*/site-packages")
    hidden = set(Path(sysconfig.get_path("purelib")).glob(pattern))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry not in hidden:
            (site / entry.name).symlink_to(entry)
    return folder / "env" / "bin" / "python"
