"""The page of all measurements, from benchmarks/results.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import chart

# Entries that are not tables, and the tables that docs/scaling.md shows.
_NOT_TABLES = ("machine", "rounds", "load")
_SHOWN_ELSEWHERE = ("simulat", "bench-scale", "all-reduce by ranks", "all-reduce, fitted")
_START = """# Benchmarks

`make bench` measured these values on {machine}.

Each table comes from one run, whose cases take turns, and a value is the median of the rounds.
Memory is in megabytes, of 10^6 bytes. [Scaling](scaling.md) has those of more workers, and
the simulated ones.

Two cores run two workers, the driver and, in some cases, Spark. So values from other machines
differ, and the ratio to the reference in the same table says more than the seconds.
"""


def write_page() -> str:
    """The page, in Markdown."""
    results = json.loads(chart.RESULTS.read_text())
    tables = {
        title: rows
        for title, rows in results.items()
        if title not in _NOT_TABLES and not title.startswith(_SHOWN_ELSEWHERE)
    }
    packages = {k: v for k, v in results["machine"].items() if k not in ("cores", "processor")}
    used = ", ".join(f"{name} {version}" for name, version in packages.items())
    machine = (
        f"{results['machine']['cores']} cores ({results['machine']['processor']}), with {used}."
    )
    return _START.format(machine=machine) + "".join(_table(*one) for one in tables.items())


def _table(title: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [
        f"| | {' | '.join(_name(column) for column in columns)} |",
        f"|---|{'---:|' * len(columns)}",
        *(
            f"| {name} | {' | '.join(_number(row.get(column)) for column in columns)} |"
            for name, row in rows.items()
        ),
    ]
    return "\n".join(["", f"## {title[0].upper()}{title[1:]}", "", *lines, ""])


def _name(column: str) -> str:
    return column.replace("_", " ")


def _number(value: Any) -> str:
    """Three significant digits, and all digits before the point."""
    if value is None:
        return ""
    if not isinstance(value, float) or value == int(value):
        return f"{value:,}" if isinstance(value, int) else f"{value:,.0f}"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    return f"{value:.3g}" if abs(value) < 0.1 else f"{value:,.{digits}f}"
