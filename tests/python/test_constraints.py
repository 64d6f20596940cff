"""constraints.txt: each supported Python gets versions that support its first patch release."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest
from conftest import full
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
UV = ROOT / ".venv" / "bin" / "uv"
FIRST = ["3.11.0", "3.12.0", "3.13.0"]
PINS = [
    Requirement(line)
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if not line.startswith("#")
]


def applies(pin: Requirement, version: str) -> bool:
    """Return whether a pin is for this Python on this machine."""
    minor = version.rpartition(".")[0]
    python = {"python_full_version": version, "python_version": minor}
    return pin.marker is None or pin.marker.evaluate(dict(python))


@pytest.mark.parametrize("version", FIRST)
def test_each_package_has_at_most_one_version(version: str) -> None:
    names = [pin.name for pin in PINS if applies(pin, version)]
    assert len(names) == len(set(names))


def test_the_versions_installed_here_support_every_python_that_gets_them() -> None:
    installed = {canonicalize_name(d.metadata["Name"]): d for d in distributions()}
    looked = 0
    for pin in PINS:
        found = installed.get(canonicalize_name(pin.name))
        if found is None or not pin.specifier.contains(found.version):
            continue
        # tensorflowonspark quotes the version.
        needed = SpecifierSet((found.metadata.get("Requires-Python") or "").replace('"', ""))
        unfit = [v for v in FIRST if applies(pin, v) and not needed.contains(v)]
        assert not unfit, f"{pin} needs Python {needed}, but constrains {unfit}"
        looked += 1
    assert looked > 100


@pytest.mark.skipif(not UV.exists(), reason="NO uv: another index is configured for pip")
@pytest.mark.parametrize("version", [FIRST[0], *map(full, FIRST[1:])])
def test_all_dependencies_resolve_for_the_first_patch_release(version: str, tmp_path: Path) -> None:
    command = [str(UV), "pip", "compile", "--quiet", "--all-extras", "pyproject.toml"]
    command += ["--constraint", "constraints.txt", "--python-version", version]
    done = subprocess.run(
        [*command, "--output-file", str(tmp_path / "resolved")],
        cwd=ROOT,
        env={**os.environ, "UV_NATIVE_TLS": "1", "UV_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=200,
    )
    if "Request failed" in done.stderr or "Failed to fetch" in done.stderr:
        pytest.skip(f"THE PACKAGE INDEX CANNOT BE REACHED: {done.stderr[-300:]}")
    assert done.returncode == 0, done.stderr
