"""Type checkers find mistakes in calls, and accept the programs of the documents."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CALLS = Path(__file__).parent / "typed_calls.py"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Found in any program of several blocks, or because an example leaves something out.
OTHER = "name-defined|import-not-found|import-untyped|no-redef|no-untyped|var-annotated|has-type"


@pytest.mark.full
def test_mistakes_are_found_and_the_documents_are_accepted(tmp_path: Path) -> None:
    text = CALLS.read_text()
    wanted = {n for n, line in enumerate(text.splitlines(), 1) if "# type: ignore" in line}
    (tmp_path / "calls.py").write_text(re.sub(r"  # type: ignore.*", "", text))
    for number, page in enumerate(PAGES):
        blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.M | re.S)
        (tmp_path / f"page{number}.py").write_text("\n".join(blocks))
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--allow-untyped-defs",
        "--allow-subclassing-any",
    ]
    command += ["--follow-imports=silent", "--cache-dir", str(tmp_path / "cache"), str(tmp_path)]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    errors = re.findall(r"(\w+)\.py:(\d+): error: (.*)", shown)
    found = {int(line) for file, line, _ in errors if file == "calls"}
    assert found == wanted, shown
    assert len(wanted) >= 28
    others = [one for one in errors if one[0] != "calls" and not re.search(rf"\[({OTHER})", one[2])]
    assert others == []
