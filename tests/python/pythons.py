"""Python environments that lack some packages."""

from __future__ import annotations

import sysconfig
import venv
from pathlib import Path


def python_without(folder: Path, pattern: str) -> Path:
    """Create a Python with the packages of this one, except those whose files match a pattern."""
    venv.create(folder / "env", symlinks=True)
    (site,) = folder.glob("env/lib/python*/site-packages")
    hidden = set(Path(sysconfig.get_path("purelib")).glob(pattern))
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if entry not in hidden:
            (site / entry.name).symlink_to(entry)
    return folder / "env" / "bin" / "python"
