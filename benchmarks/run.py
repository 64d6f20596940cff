"""All benchmarks: prints tables and writes results.json beside this file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import collective
import large
import launch
import single
import step

HERE = Path(__file__).parent


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds (default 3)")
    rounds = parser.parse_args().rounds
    results = {
        "machine": {
            "cores": os.cpu_count(),
            "processor": platform.machine(),
            "python": platform.python_version(),
            **{name: version(name) for name in ("tensorflow-cpu", "keras", "pyspark", "numpy")},
        },
        "rounds": rounds,
        "step, 2 workers x 1 thread, 64 images each": step.measure(rounds),
        "all-reduce between 2 processes": collective.measure(rounds),
        "step, 49 million parameters, 2 workers x 1 thread": large.measure(rounds),
        "step, 1 worker": single.measure(rounds),
        "launch of a no-op, 2 workers, warm": launch.measure(rounds),
    }
    for title, rows in results.items():
        if isinstance(rows, dict) and title != "machine":
            print_table(title, rows)
    (HERE / "results.json").write_text(json.dumps(results, indent=2) + "\n")


def print_table(title: str, rows: dict[str, dict[str, float]]) -> None:
    """One line per row, one column per figure."""
    print(f"\n{title}")
    columns = list(next(iter(rows.values())))
    print(f"{'':42}" + "".join(f"{name:>17}" for name in columns))
    for name, figures in rows.items():
        print(f"{name:42}" + "".join(f"{figures[c]:17.2f}" for c in columns))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
