"""Each example learns; the R blocks of the landing page and the keras3 page run."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from conftest import R_VARIABLES, needs_r
from test_readme import README, run

import pybackend

ROOT = Path(pybackend.__file__).parents[1]
NAMES = ("several_inputs", "text_classification", "time_series", "transfer_learning")


def test_the_examples_come_in_both_languages() -> None:
    folder, listed = ROOT / "examples", (ROOT / "examples/README.md").read_text()
    assert sorted(path.stem for path in folder.glob("*.py")) == list(NAMES)
    assert sorted(path.stem for path in folder.glob("*.R")) == list(NAMES)
    for name in NAMES:
        assert f"[{name}.py]({name}.py), [{name}.R]({name}.R)" in listed


def test_no_example_validates_on_rows_sorted_by_class() -> None:
    folders = ("docs", "vignettes", "rpkg/R", "examples")
    pages = [page for one in folders for page in (ROOT / one).rglob("*.*") if page.is_file()]
    for page in [*pages, README, ROOT / "rpkg/README.md"]:
        text = page.read_text(errors="replace")
        assert not re.search(r"\biris,[^)]*validation_split", text), page


@pytest.mark.full
def test_the_examples_in_python_learn(tmp_path: Path) -> None:
    # One process, so that TensorFlow is imported once.
    programs = [f"runpy.run_path({str(ROOT / 'examples' / name)!r} + '.py')" for name in NAMES]
    (tmp_path / "all.py").write_text("import runpy\n" + "\n".join(programs))
    assert_learned(run([sys.executable, "all.py"], tmp_path))


@pytest.mark.full
@needs_r
def test_the_examples_in_r_learn(tmp_path: Path) -> None:
    programs = [ROOT / "examples" / f"{name}.R" for name in NAMES]
    for page in ("docs/site/index.md", "docs/migrating/keras3.md"):
        blocks = re.findall(r"```r\n(.*?)```", (ROOT / page).read_text(), re.S)
        programs.append(tmp_path / f"{Path(page).stem}.R")
        programs[-1].write_text("\n".join(blocks))
    lines = [f'source("{program}", local = new.env())' for program in programs]
    (tmp_path / "all.R").write_text("\n".join(lines))
    assert_learned(run(["Rscript", "all.R"], tmp_path, **R_VARIABLES))


def assert_learned(shown: str) -> None:
    """Check the result that each example prints against its baseline, after the colon."""
    pattern = r"^((?:accuracy|mean error|half of) .*?)([\d.]+)[^;]*; .*: ([\d.]+)"
    found = re.findall(pattern, shown, re.M)
    assert len(found) == len(NAMES), shown
    for what, ours, guess in found:
        is_accuracy = what.startswith("accuracy")
        assert float(ours) > float(guess) + 0.1 if is_accuracy else float(ours) < 0.8 * float(guess)
