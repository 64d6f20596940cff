"""What a release consists of: `make release`, and the workflow that drafts it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = ROOT / ".github" / "workflows"


def run(
    *command: str | Path, folder: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command without a network proxy or index to ask."""
    return subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, "PIP_NO_INDEX": "1", "UV_OFFLINE": "1", **variables},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_release_is_built_twice_and_has_an_sbom_and_checksums(tmp_path: Path) -> None:
    extra = tmp_path / "tfdist_0.tar.gz"
    extra.write_bytes(b"an R package")
    out = tmp_path / "release"
    made = run("scripts/release.sh", out, extra)
    assert made.returncode == 0, made.stderr
    names = {path.name for path in out.iterdir()}
    (wheel,) = out.glob("tfdist-*.whl")
    assert names == {
        wheel.name,
        wheel.name.replace("-py3-none-any.whl", ".tar.gz"),
        extra.name,
        "sbom.cdx.json",
        "SHA256SUMS",
    }
    checked = run("sha256sum", "--check", "--strict", "SHA256SUMS", folder=out)
    assert checked.returncode == 0, checked.stderr
    assert checked.stdout.count(": OK") == len(names) - 1
    pinned = re.findall(r"^([^=\s]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    listed = json.loads((out / "sbom.cdx.json").read_text())["components"]
    assert {(one["name"], one["version"]) for one in listed} == set(pinned)
    assert "pybackend/__init__.py" in zipfile.ZipFile(wheel).namelist()


def test_a_tag_of_another_version_is_rejected(tmp_path: Path) -> None:
    made = run("scripts/release.sh", tmp_path / "release", RELEASE="v99.0")
    assert made.returncode == 1
    assert "the tag is v99.0, but pybackend/__init__.py has version" in made.stderr
    assert list(tmp_path.iterdir()) == []


def test_actions_are_pinned_and_permissions_are_minimal() -> None:
    for path in WORKFLOWS.glob("*.yml"):
        text = path.read_text()
        used = re.findall(r"uses: *(\S+)(.*)", text)
        assert used, path
        for action, comment in used:
            assert re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", action), (path.name, action)
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), (path.name, action)
        assert re.search(r"^permissions:\n  contents: read$", text, re.M), path.name
