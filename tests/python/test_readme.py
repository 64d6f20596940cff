"""The blocks of the README and of the guides run unchanged, with the output that they show."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import FORGE, R_VARIABLES, needs_r

import pybackend

ROOT = Path(pybackend.__file__).parents[1]
README = ROOT / "README.md"
# A block with its output, unless a comment exempts it.
_BLOCK = re.compile(
    r"(<!-- not run: [^\n]+ -->\n)?```(\w+)\n(.*?)```\n(?:\n?```text\n(.*?)```)?", re.DOTALL
)
_SECONDS = re.compile(r"\(\d+\.\d s\)")
_NUMBER = re.compile(r"\d+\.\d+")
# Guides whose Python blocks run in order, with their requirements.
GUIDES = {
    "spark": ["data"],
    "local": [
        "training",
        "functions",
        "monitoring",
        "tuning",
        "recovery",
        "bench-scale",
        "databases",
        "detached",
        "strategies",
        "lakes",
    ],
}


def read_blocks(page: Path, language: str) -> tuple[str, str]:
    """Return the program of all blocks of a language, and the output that the page shows."""
    found = [b for b in _BLOCK.findall(page.read_text()) if b[1] == language and not b[0]]
    return "\n".join(code for _, _, code, _ in found), "".join(shown for *_, shown in found)


def run(command: list[str], folder: Path, **variables: str) -> str:
    """Return the output of a program whose workers are forked."""
    FORGE.start()
    paths = [os.environ["PYTHONPATH"], str(ROOT)]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), **variables},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def is_alike(shown: str, printed: str) -> bool:
    """Return whether two lines differ only in seconds and in the last digits of numbers."""
    texts = [_SECONDS.sub("(s)", line).strip() for line in (shown, printed)]
    numbers = [[float(number) for number in _NUMBER.findall(text)] for text in texts]
    return _NUMBER.sub("0", texts[0]) == _NUMBER.sub("0", texts[1]) and numbers[0] == pytest.approx(
        numbers[1], abs=0.02
    )


def assert_prints(shown: str, printed: str) -> None:
    """Check that the lines of a page are among the printed lines, in their order."""
    lines = iter(printed.splitlines())
    for line in shown.splitlines():
        assert any(is_alike(line, other) for other in lines), f"{line!r} is not in {printed}"


def test_the_readme_is_one_page() -> None:
    assert len(README.read_text().splitlines()) <= 150


def test_the_python_blocks_train_and_print_what_is_shown(tmp_path: Path) -> None:
    program, shown = read_blocks(README, "python")
    assert len(shown.splitlines()) >= 5
    (tmp_path / "example.py").write_text(program)
    assert_prints(shown, run([sys.executable, "example.py"], tmp_path))
    assert pybackend.load_model(tmp_path / "model.keras").input_shape == (None, 4)
    assert {path.name for path in tmp_path.iterdir()} == {"example.py", "model.keras"}


@needs_r
def test_the_r_blocks_train_and_print_what_is_shown(tmp_path: Path) -> None:
    program, shown = read_blocks(README, "r")
    assert len(shown.splitlines()) >= 2
    (tmp_path / "example.R").write_text(program)
    assert_prints(shown, run(["Rscript", "example.R"], tmp_path, **R_VARIABLES))
    assert {path.name for path in tmp_path.iterdir()} == {"example.R", "flowers.keras"}


@pytest.mark.parametrize("page", ["README.md", "rpkg/README.md", "docs/site/r.md"])
def test_the_packages_that_r_needs_are_named(page: str) -> None:
    imports = re.search(r"^Imports:\n((?: .*\n)+)", (ROOT / "rpkg/DESCRIPTION").read_text(), re.M)
    assert imports is not None
    names = {line.split()[0] for line in imports[1].replace(",", "").splitlines()}
    names -= {"graphics", "grDevices", "parallel", "stats", "tools", "utils"}  # part of R
    listed = re.search(r"install\.packages\(c\((.*?)\)\)", (ROOT / page).read_text())
    assert listed is not None
    assert set(re.findall(r'"(\w+)"', listed[1])) == names | {"keras3"}


@pytest.mark.full
@pytest.mark.parametrize("needs", GUIDES)
def test_the_guides_run_from_top_to_bottom(needs: str, tmp_path: Path) -> None:
    programs = []
    for name in GUIDES[needs]:
        program, _ = read_blocks(ROOT / "docs" / f"{name}.md", "python")
        assert "pybackend." in program
        (tmp_path / f"{name}.py").write_text(program)
        programs.append(f"runpy.run_path('{name}.py', run_name='__main__')")
    # One process, so that TensorFlow is imported once.
    (tmp_path / "all.py").write_text("\n".join(["import runpy", *programs]))
    spark = {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    jobs = {"TFDIST_JOBS": str(tmp_path / "jobs")}
    shown = run([sys.executable, "all.py"], tmp_path, **spark, **jobs)
    assert ".pred_class" in shown
