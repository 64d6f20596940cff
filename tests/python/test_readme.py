"""The README's first example, and the page about data, run as they stand."""

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


def test_the_first_python_example_trains_and_saves(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "example.py").write_text(blocks[0])
    shown = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
        timeout=200,
    ).stdout
    assert "3 workers, 600 rows, 5 epochs" in shown
    assert pybackend.load_model(tmp_path / "model.keras").input_shape == (None, 4)
    assert {path.name for path in tmp_path.iterdir()} == {
        "example.py",
        "history.png",
        "model.keras",
        "run.json",
        "served",
    }
    assert pybackend.TrainResult.load(tmp_path / "run.json").epochs == 5


@pytest.mark.full
def test_the_pages_about_data_and_tracking_run_from_top_to_bottom(tmp_path: Path) -> None:
    pages = [(ROOT / "docs" / name).read_text() for name in ("data.md", "tracking.md")]
    assert all(page.count("```python\n") >= 5 for page in pages)
    blocks = re.findall(r"```python\n(.*?)```", "".join(pages), re.DOTALL)
    (tmp_path / "page.py").write_text("\n".join(blocks))
    FORGE.start()
    done = subprocess.run(
        [sys.executable, "page.py"],
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
    assert ".pred_class" in done.stdout
