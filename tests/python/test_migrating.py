"""The pages for users of other tools run unchanged, from top to bottom."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FORGE

import pybackend

ROOT = Path(pybackend.__file__).parents[1]
PAGES = sorted((ROOT / "docs/migrating").glob("*.md"))


@pytest.mark.full
def test_the_pages_run_from_top_to_bottom(tmp_path: Path) -> None:
    parts = {
        page.stem: re.findall(r"```python\n(.*?)```", page.read_text(), re.S) for page in PAGES
    }
    # These are for users of R, and have their own tests.
    assert [name for name, blocks in parts.items() if not blocks] == ["keras3", "spark-apply"]
    # One process, and so one Spark session, for all of them.
    for name, blocks in parts.items():
        (tmp_path / f"{name}.py").write_text("\n".join(blocks))
    programs = [f"runpy.run_path('{name}.py', run_name='__main__')" for name in parts]
    (tmp_path / "all.py").write_text("import runpy\n" + "\n".join(programs))
    FORGE.start()
    done = subprocess.run(
        [sys.executable, "all.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)]),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_LOCAL_IP": "127.0.0.1",
        },
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
