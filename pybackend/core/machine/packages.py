"""Check that the same versions of TensorFlow and Keras are installed on all hosts.

Only the metadata of installed packages is read: importing TensorFlow takes seconds.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distributions, version
from importlib.util import find_spec
from typing import Any

TITLES = {"tensorflow": "TensorFlow", "keras": "Keras"}
# Names of their published builds.
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
    """Return the path of this Python, as ``python``, and the version of each package."""
    return {"python": sys.executable, **{package: find_version(package) for package in BUILDS}}


def read_versions_in(python: str, folders: Iterable[str]) -> dict[str, Any]:
    """Return the same for another Python, whose packages are in some folders."""
    found = {
        str(one.metadata["Name"]).lower().replace("_", "-"): one.version.partition("+")[0]
        for one in distributions(path=list(folders))
    }
    named = {
        package: next((found[name] for name in names if name in found), None)
        for package, names in BUILDS.items()
    }
    return {"python": python, **named}


def find_difference(
    hosts: Sequence[str], found: Sequence[Mapping[str, Any]], remedy: str = SET_PYSPARK_PYTHON
) -> tuple[int, str] | None:
    """Return the first rank whose packages prevent training, and the reason; None if there is none.

    ``found`` are the results of `read_versions` on each rank's host, and ``remedy`` is an
    alternative to installing a package.
    """
    for package, title in TITLES.items():
        versions = [have[package] for have in found]
        known = [v for v in versions if v not in (None, UNKNOWN)]
        # The most common version is the expected one; in a tie, that of the lowest rank.
        wanted = Counter(known).most_common(1)[0][0] if known else None
        for rank, have in enumerate(versions):
            if have is not None and have in (wanted, UNKNOWN):
                continue
            # An elastic worker that has not joined yet has no Python, only unknown versions
            # (test_a_worker_that_has_not_joined_differs_from_none).
            python = found[rank]["python"]
            command = f"{python} -m pip install {package}{f'=={wanted}' if wanted else ''}"
            if have is None:
                return rank, (
                    f"worker {rank} on {hosts[rank]} has no {title}: its Python is {python}. "
                    f"Install it there with `{command}`, or {remedy}"
                )
            peer = versions.index(wanted)
            return rank, (
                f"worker {rank} on {hosts[rank]} has {title} {have}, worker {peer} on "
                f"{hosts[peer]} has {wanted}: install the same version on every host "
                f"(there: {command}), or {remedy}"
            )
    return None


def find_version(package: str) -> str | None:
    """Return the version of a package; None if absent, ``"unknown"`` if it has no metadata."""
    for name in BUILDS.get(package, (package,)):
        with suppress(PackageNotFoundError):
            # The part after "+" names the build.
            return version(name).partition("+")[0]
    return UNKNOWN if find_spec(package) else None
