"""What this machine has to train with; imports none of the packages that it reports."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import pybackend

_DISTRIBUTIONS = {
    "tensorflow": ("tensorflow", "tensorflow-cpu", "tensorflow-intel", "tf-nightly"),
    "keras": ("keras",),
    "numpy": ("numpy",),
    "h5py": ("h5py",),
    "pyspark": ("pyspark", "pyspark-client", "databricks-connect"),
    "pyarrow": ("pyarrow",),
}
# As in pyproject.toml: for Python 3.10, Keras is mended in its 3.12 series.
_LEAST = {
    "tensorflow": (2, 18),
    "keras": (3, 13, 2) if sys.version_info >= (3, 11) else (3, 12, 4),
}


def doctor() -> dict[str, Any]:
    """Versions (None where absent), cores, memory, GPUs, and the problems found.

    Returns
    -------
    dict
        ``python``, ``python_version``, ``version``, one entry per package, ``java``, ``cores``,
        ``memory_gb``, ``gpus`` (list of names) and ``problems`` (list of text).
    """
    found: dict[str, Any] = {
        "python": sys.executable,
        "python_version": platform.python_version(),
        "version": pybackend.__version__,
        **{name: _version(names) for name, names in _DISTRIBUTIONS.items()},
        "java": _java(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "memory_gb": _memory_gb(),
        "gpus": _gpus(),
    }
    found["problems"] = _problems(found)
    return found


def _version(names: tuple[str, ...]) -> str | None:
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None


def _problems(found: dict[str, Any]) -> list[str]:
    problems = []
    for name, least in _LEAST.items():
        wanted = ".".join(map(str, least))
        have = found[name]
        if have is None:
            problems.append(f"{name} is not installed: install {name} >= {wanted}")
        elif tuple(int(n) for n in re.findall(r"\d+", have)[:3]) < least:
            problems.append(f"{name} {have} is too old: install {name} >= {wanted}")
    if found["pyspark"] is not None and found["pyarrow"] is None:
        problems.append("pyspark is installed without pyarrow, which training on Spark needs")
    if found["pyspark"] is not None and found["java"] is None:
        problems.append("no Java was found: a local Spark needs Java 17")
    return problems


def _java() -> str | None:
    java = shutil.which("java")
    if java is None:
        return None
    shown = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    match = re.search(r'version "([^"]+)"', shown.stderr)
    return match[1] if match else None


def _memory_gb() -> float | None:
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError):
        return None
    return round(pages * size / 2**30, 1)


def _gpus() -> list[str]:
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return []
    shown = subprocess.run(
        [smi, "--query-gpu=name", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return [line.strip() for line in shown.stdout.splitlines() if shown.returncode == 0]
