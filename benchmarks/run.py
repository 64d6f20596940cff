"""Run all benchmarks: print tables and write results.json in this folder."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# It imports TensorFlow after a call, while the next one is measured.
os.environ["TFDIST_FORK_SERVER"] = "0"

import audit
import bench_scale
import checkpoints
import collective
import elastic
import environment
import fed_training
import feed
import frame_step
import hierarchy
import inference
import killed
import large
import launch
import machines
import memory
import others
import particles
import recovery
import returning
import scaling
import shards
import simulate
import single
import soak
import sql
import step
import strategy
import tfrecord
import trials
import wan
import wire

RESULTS = Path(__file__).with_name("results.json")
Table = dict[str, dict[str, float]]
PARTS: dict[str, Callable[[int], dict[str, Table]]] = {
    "step": step.measure,
    "collective": lambda rounds: {
        "all-reduce between 2 processes": collective.measure(rounds),
        "all-reduce of 20 MB between 8 processes, 2 cores": collective.in_memory(rounds),
    },
    "large": lambda rounds: {
        "step, 49 million parameters, 2 workers x 1 thread": large.measure(rounds)
    },
    "shards": shards.measure,
    "audit": audit.measure,
    "audit_suite": audit.find,
    "checkpoints": checkpoints.measure,
    "single": lambda rounds: {"step, 1 worker": single.measure(rounds)},
    "launch": launch.measure,
    "trials": trials.measure,
    "environment": environment.measure,
    "tfrecord": tfrecord.measure,
    "feed": lambda rounds: feed.measure(rounds) | feed.shuffled(rounds),
    "fed_training": fed_training.measure,
    "frame_step": frame_step.per_step,
    "memory": lambda rounds: memory.memory(),
    "returning": returning.model_return,
    "inference": inference.measure,
    "wan": wan.measure,
    "wire": wire.measure,
    "machines": machines.measure,
    "soak": lambda rounds: soak.measure(is_long=False),
    "recovery": recovery.measure,
    "killed": killed.measure,
    "elastic": elastic.measure,
    "sql": sql.measure,
    "strategy": strategy.measure,
    "scaling": lambda rounds: scaling.measure(),
    "simulate": simulate.measure,
    "bench_scale": bench_scale.measure,
    "hierarchy": hierarchy.measure,
    "others": others.measure,
    "particles": lambda rounds: particles.measure(),
}
# Parts that take minutes and run only once.
ONCE = ("audit_suite", "soak", "particles", "trials")
LONG = {"soak": lambda: soak.measure(is_long=True)}


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5, help="interleaved rounds (default: 5)")
    parser.add_argument("--only", choices=PARTS, help="measure this part, keep the other tables")
    parser.add_argument(
        "--long", choices=LONG, help="measure this part with its long setting, keep the others"
    )
    asked = parser.parse_args()
    asked.only = asked.long or asked.only
    results = kept() if asked.only else {"machine": machine(), "rounds": {}}
    for part in [asked.only] if asked.only else PARTS:
        # What else the machine did in the minute before, in running processes.
        results.setdefault("load", {})[part] = round(os.getloadavg()[0], 2)
        tables = LONG[part]() if asked.long else PARTS[part](asked.rounds)
        results["rounds"][part] = 1 if part in ONCE else asked.rounds
        results |= tables
        for title, rows in tables.items():
            print_table(title, rows)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n")


def machine() -> dict[str, Any]:
    """Describe the machine and the versions of packages."""
    packages = ("tensorflow-cpu", "keras", "pyspark", "numpy")
    return {
        "cores": os.cpu_count(),
        "processor": platform.machine(),
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
    }


def kept() -> dict[str, Any]:
    """Read the results so far; a file has the results of one machine only."""
    results: dict[str, Any] = json.loads(RESULTS.read_text())
    if results["machine"] != machine():
        raise SystemExit(
            f"{RESULTS} was measured with {results['machine']}, not with this machine: measure all "
            "parts"
        )
    return results


def print_table(title: str, rows: Table) -> None:
    """Print one line per row and one column per value."""
    print(f"\n{title}")
    columns = list(next(iter(rows.values())))
    print(f"{'':42}" + "".join(f"{name:>17}" for name in columns))
    for name, figures in rows.items():
        print(f"{name:42}" + "".join(f"{figures[c]:17.2f}" for c in columns))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
