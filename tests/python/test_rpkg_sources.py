"""The R package's links to the Python sources: R CMD build makes an installable copy of them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_links_hold_a_package_that_builds(tmp_path: Path) -> None:
    # R CMD build and R CMD INSTALL copy the targets of links, too.
    shutil.copytree(
        ROOT / "rpkg/inst/python", tmp_path / "python", ignore=shutil.ignore_patterns("__pycache__")
    )
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=tmp_path / "python",
        check=True,
        capture_output=True,
    )
    (wheel,) = tmp_path.glob("tfdist-*.whl")
    built = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("pybackend/")}
    kept = [p for p in (ROOT / "pybackend").rglob("*") if p.is_file() and p.suffix != ".pyc"]
    assert built == {p.relative_to(ROOT).as_posix() for p in kept}
