"""Python environments that lack some packages."""

from __future__ import annotations

import re
import sysconfig
import venv
from importlib.metadata import distribution
from pathlib import Path


def python_without(folder: Path, pattern: str) -> Path:
    """Create a Python with the packages of this one, except those whose files match a pattern."""
    hidden = set(Path(sysconfig.get_path("purelib")).glob(pattern))
    names = {entry.name for entry in Path(sysconfig.get_path("purelib")).iterdir()}
    return _make(folder, names - {entry.name for entry in hidden})


def python_with(folder: Path, *packages: str) -> Path:
    """Create a Python with some packages of this one, and the packages that they require."""
    names: set[str] = set()
    found, wanted = set(), list(packages)
    while wanted:
        package = wanted.pop()
        if package in found:
            continue
        found.add(package)
        one = distribution(package)
        names |= {path.parts[0] for path in one.files or () if path.parts[0] not in ("..", "")}
        for required in one.requires or ():
            if "extra ==" not in required and "python_version <" not in required:
                wanted.append(re.split(r"[^\w.-]", required)[0])
    return _make(folder, names - {"__pycache__"})


def _make(folder: Path, names: set[str]) -> Path:
    venv.create(folder / "env", symlinks=True)
    (site,) = folder.glob("env/lib/python*/site-packages")
    for name in sorted(names):
        (site / name).symlink_to(Path(sysconfig.get_path("purelib"), name))
    return folder / "env" / "bin" / "python"
