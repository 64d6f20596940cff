"""What lanes have found: numbers of tests, failures, and where the time went."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from lane import Ended, Lane

OUTCOMES = ("passed", "failed", "skipped")
_SLOW_TEST_SECONDS = 5.0
_R_TOTAL = re.compile(r"^R tests: (\d+) passed, (\d+) failed, (\d+) skipped", re.MULTILINE)
_R_FAILED = re.compile(r"^FAILED (test-\S+: .+)$", re.MULTILINE)
# A test's name, what is printed meanwhile, and its seconds.
_R_TEST = re.compile(
    r"^(test-\S+: [^\n]+?)(?:WARNING:[^\n]*)?(?:\n(?!test-)[^\n]*)*? \((\d+\.\d) s\)$", re.MULTILINE
)


def show(ended: Ended) -> None:
    """Print a lane's output in one piece."""
    print(f"\n===== {ended.lane.name}: {_verdict(ended)} =====", flush=True)
    if ended.lane.log.exists():
        with ended.lane.log.open("rb") as log:
            shutil.copyfileobj(log, sys.stdout.buffer)
    sys.stdout.flush()


def conclude(lanes: Sequence[Ended], seconds: float) -> int:
    """Print a table of the lanes, the failures, and the line that a CI reads; the exit status."""
    total: Counter[str] = Counter()
    print(f"\n{'lane':<18}{'passed':>8}{'failed':>8}{'skipped':>8}")
    for ended in lanes:
        counts = count_tests(ended.lane)
        if ended.unstable:
            counts["passed"] += counts.pop("failed")
        total.update(counts)
        # Lint, say, has no tests: its failure counts as one.
        total["failed"] += bool(ended.problem) and not counts["failed"]
        numbers = "".join(f"{counts[name]:>8}" for name in OUTCOMES)
        print(f"{ended.lane.name:<18}{numbers}  {_verdict(ended)}")
    failed = [ended for ended in lanes if ended.problem]
    for ended in failed:
        print(f"\nFAILED {ended.lane.name}: {ended.problem}; its last lines, of {ended.lane.log}:")
        print("\n".join(_read_log(ended.lane).splitlines()[-30:]))
    for name in (name for ended in lanes for name in ended.unstable):
        print(f"\nUNSTABLE {name}: it failed beside other lanes, and passed when run again alone")
    may_skip = os.environ.get("TFDIST_TEST_REQUIRE") != "1"
    if total["skipped"] and not may_skip:
        print("\nFAILED: tests were skipped, and TFDIST_TEST_REQUIRE=1")
    print(f"\n{len(lanes)} lanes in {seconds:.0f} s")
    print(", ".join(f"{total[name]} {name}" for name in OUTCOMES))
    return int(bool(failed) or bool(total["skipped"] and not may_skip))


def _verdict(ended: Ended) -> str:
    late = f", late: its budget is {ended.lane.budget:.0f} s" if ended.is_late else ""
    return f"{ended.seconds:.0f} s{late}" + (f", FAILED: {ended.problem}" if ended.problem else "")


def count_tests(lane: Lane) -> Counter[str]:
    """Numbers of tests by outcome."""
    if lane.report.exists():
        return Counter(outcome for _, outcome, _ in _read_report(lane.report))
    found = _R_TOTAL.findall(_read_log(lane))
    return Counter(dict(zip(OUTCOMES, map(int, found[-1]), strict=True)) if found else {})


def list_failed(lane: Lane) -> list[str]:
    """The tests that failed; none of a lane that failed otherwise."""
    if not lane.report.exists():
        return list(dict.fromkeys(_R_FAILED.findall(_read_log(lane))))
    return [name for name, outcome, _ in _read_report(lane.report) if outcome == "failed"]


def time_tests(lane: Lane) -> dict[str, float]:
    """Seconds of each test."""
    if lane.report.exists():
        return {name: seconds for name, _, seconds in _read_report(lane.report)}
    return {name: float(seconds) for name, seconds in _R_TEST.findall(_read_log(lane))}


def _read_log(lane: Lane) -> str:
    return lane.log.read_text(errors="replace") if lane.log.exists() else ""


def _read_report(report: Path) -> Iterator[tuple[str, str, float]]:
    """Name, outcome and seconds of each test."""
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 (pytest has written it)
        found = {child.tag for child in case}
        is_skipped = "skipped" in found
        outcome = "failed" if found & {"failure", "error"} else "skipped" * is_skipped or "passed"
        module = case.get("classname", "").rpartition(".")[2]
        yield f"{module}::{case.get('name')}", outcome, float(case.get("time", 0))


def record(lanes: Sequence[Ended], seconds: float, path: Path) -> None:
    """Write how long the lanes and their slow tests took."""
    tests = {name: s for ended in lanes for name, s in time_tests(ended.lane).items()}
    slow = [(s, name) for name, s in tests.items() if s >= _SLOW_TEST_SECONDS]
    content = {
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "seconds": round(seconds),
        "lanes": {
            ended.lane.name: {
                "seconds": round(ended.seconds),
                "budget": ended.lane.budget,
                "tests": count_tests(ended.lane).total(),
            }
            for ended in lanes
        },
        "slow_tests": {name: round(s, 1) for s, name in sorted(slow, reverse=True)},
    }
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")
