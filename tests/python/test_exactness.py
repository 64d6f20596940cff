"""The page about exactness lists the results of all tests."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import test_audit
import test_engine
import test_exact_cases
import test_exact_keras
import test_exact_together
import test_transfer

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))

import exactness  # noqa: E402

CASES = {
    "test_exact_cases": test_exact_cases.CASES,
    "test_exact_keras": test_exact_keras.CASES,
    "test_exact_together": test_exact_together.CASES,
    "test_transfer": test_transfer.CASES,
    "test_engine": test_engine.REFUSED,
    "test_audit": test_audit.DIFFERENT,
}


def _rows(title: str) -> dict[str, str]:
    """Return the table under a heading of the page."""
    section = exactness.PAGE.read_text().partition(f"## {title}\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.*?) \| (.*?) \|", section, re.MULTILINE)
    return dict(rows[1:])


def test_every_case_is_on_the_page() -> None:
    for module, title in {**exactness.EQUAL, **exactness.REFUSED}.items():
        assert sorted(_rows(title)) == sorted(CASES[module]), "run `make exactness`"


def test_the_page_begins_as_it_is_written() -> None:
    written = exactness.write_page([]).partition("## Optimizers")[0]
    assert exactness.PAGE.read_text().startswith(written)


def test_what_is_equal_is_within_its_tolerance() -> None:
    for module in exactness.EQUAL:
        for name, bound in _rows(exactness.EQUAL[module]).items():
            assert float(bound) <= 10 * CASES[module][name].tolerance


def test_the_page_is_written_from_outcomes() -> None:
    found: list[dict[str, object]] = [
        {"module": "test_exact_cases", "name": "a", "shown": 3e-8, "notes": ["n: m", "n: o"]},
        {"module": "test_exact_cases", "name": "b", "shown": 0.0, "notes": []},
        {"module": "test_engine", "name": "c", "shown": "x | y: use z", "notes": []},
    ]
    page = exactness.write_page(found)
    assert "| a | 1e-7 | n |\n| b | 0 |  |\n" in page
    assert "| c | x \\| y |" in page
