"""TensorFlow and Keras on the workers' hosts: installed, and the same everywhere.

Only the installed packages' metadata is read: importing TensorFlow takes seconds.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

TITLES = {"tensorflow": "TensorFlow", "keras": "Keras"}
# Names under which builds of them are published.
BUILDS = {
    "tensorflow": (
        "tensorflow",
        "tensorflow-cpu",
        "tensorflow-intel",
        "tensorflow-macos",
        "tensorflow-rocm",
        "tf-nightly",
    ),
    "keras": ("keras", "keras-nightly"),
}
UNKNOWN = "unknown"
SET_PYSPARK_PYTHON = "set PYSPARK_PYTHON to a Python that has it on every host"


def read_versions() -> dict[str, Any]:
    """What this Python has: ``python``, its path, and `find_version` of each package."""
    found: dict[str, Any] = {"python": sys.executable}
    for package in BUILDS:
        found[package] = find_version(package)
    return found


def find_difference(
    hosts: Sequence[str],
    found: Sequence[Mapping[str, Any]],
    remedy: str = SET_PYSPARK_PYTHON,
) -> tuple[int, str] | None:
    """The first rank whose packages keep a training from starting, and why; None: all is well.

    Parameters
    ----------
    hosts, found
        Each rank's host, and what `read_versions` gave there.
    remedy
        What else to do than to install something.
    """
    for package, title in TITLES.items():
        versions = [have[package] for have in found]
        known = [v for v in versions if v not in (None, UNKNOWN)]
        # What most hosts have is what the others should have; of two, what the lower rank has.
        wanted = Counter(known).most_common(1)[0][0] if known else None
        for rank, have in enumerate(versions):
            if have is None:
                absent = _absent(rank, hosts, found[rank]["python"], package, wanted)
                return rank, f"{absent}, or {remedy}"
            if have not in (wanted, UNKNOWN):
                peer = versions.index(wanted)
                return rank, (
                    f"worker {rank} on {hosts[rank]} has {title} {have}, worker {peer} on "
                    f"{hosts[peer]} has {wanted}: install the same version on every host "
                    f"(there: {_pip(found[rank]['python'], package, wanted)}), or {remedy}"
                )
    return None


def _absent(rank: int, hosts: Sequence[str], python: str, package: str, wanted: str | None) -> str:
    return (
        f"worker {rank} on {hosts[rank]} has no {TITLES[package]}: its Python is {python}. "
        f"Install it there with `{_pip(python, package, wanted)}`"
    )


def _pip(python: str, package: str, wanted: str | None) -> str:
    return f"{python} -m pip install {package}" + (f"=={wanted}" if wanted else "")


def find_version(package: str) -> str | None:
    """The version of a package's build; None if absent, ``"unknown"`` if without metadata."""
    for name in BUILDS.get(package, (package,)):
        with suppress(PackageNotFoundError):
            # After "+" comes who built it.
            return version(name).partition("+")[0]
    return UNKNOWN if find_spec(package) else None
