"""Runs all checks in lanes, two at a time, each with a budget of seconds; what `make test` does.

A third lane runs beside two: those that mostly wait come first. A lane is a command of its own:
what shares a Spark session, or needs R, is in one. Its output is printed in one piece when it ends,
a failure is named again at the end, and the last line says how many tests passed, failed and were
skipped. Up to three tests that failed are run once more at the end (`lane_again.py`). A lane beyond
its budget is said to be late, as machines differ; one beyond twice its budget is ended with
everything it has started, after its processes have printed their stacks, and fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from lane import BUILD, ROOT, Ended, Lane, end_all, run_lane
from lane_again import run_again
from lane_results import conclude, record, show

RECORD = ROOT / "benchmarks" / "durations.json"
SLOTS = 2
# A loop's seconds on the machine for which the budgets below were written, two cores of it.
_REFERENCE_SECONDS = 0.35
# Budgets are what a lane takes there beside another one; a machine differs from itself, too.
_MARGIN = 1.5

# The Python tests' modules by what they need; all others are the lane `unit`. A lane shares one
# Spark session of a kind, and one process from which workers are forked.
MODULES = {
    "processes": [
        "test_callbacks",
        "test_cli",
        "test_data",
        "test_datasets",
        "test_elastic",
        "test_engine",
        "test_exchange",
        "test_frames",
        "test_function",
        "test_in_process",
        "test_local",
        "test_notebook",
        "test_object_store",
        "test_plan",
        "test_quiet",
        "test_quiet_imports",
        "test_r_function",
        "test_readme",
        "test_recovery",
        "test_scaling",
        "test_sources",
        "test_strategy",
        "test_train",
        "test_warm",
    ],
    "exact": [
        "test_epochs",
        "test_exact",
        "test_exact_cases",
        "test_exact_keras",
        "test_exact_random",
        "test_exact_shards",
        "test_exact_together",
        "test_feed",
        "test_learning_rate",
        "test_local_steps",
        "test_mnist",
        "test_transfer",
    ],
    "spark": ["test_distributor", "test_probe", "test_routes", "test_spark"],
    "frames": [
        "test_dfutil",
        "test_ml",
        "test_particles",
        "test_predict",
        "test_records",
        "test_score",
        "test_sql_spark",
        "test_tfos_pipeline",
    ],
    "functions": ["test_examples", "test_migrating", "test_tfos"],
    "connect": ["test_connect", "test_explain", "test_session"],
    "hosts": ["test_standalone"],
    "machines": [
        "test_host_list",
        "test_hosts",
        "test_janitor",
        "test_resources",
        "test_joined",
        "test_kubernetes",
        "test_remote_task",
        "test_run",
        "test_run_hosts",
        "test_ssh",
    ],
    "slurm": ["test_slurm", "test_slurm_place", "test_slurm_step"],
    "models": [
        "test_archive_checks",
        "test_by_value",
        "test_collective",
        "test_collective_peers",
        "test_compression",
        "test_deploy",
        "test_hdf5_checks",
        "test_lower",
        "test_rendezvous",
        "test_serialization",
        "test_sql",
        "test_tf_config",
    ],
}


def modules_of(lane: str) -> list[str]:
    """Files of a Python lane, relative to the root."""
    files = sorted((ROOT / "tests" / "python").glob("test_*.py"))
    elsewhere = {name for names in MODULES.values() for name in names}
    chosen = MODULES.get(lane) or [f.stem for f in files if f.stem not in elsewhere]
    return [str(f.relative_to(ROOT)) for f in files if f.stem in chosen]


def python_lane(name: str, budget: float, waits: bool = False) -> Lane:
    """Pytest over the modules of a lane."""
    options = (f"--junitxml={BUILD}/{name}.xml", "-o", f"cache_dir={BUILD}/{name}.cache")
    command = (sys.executable, "-m", "pytest", "-q", *options, *modules_of(name))
    return Lane(name, command, budget, waits=waits)


def make_lane(target: str, budget: float, after: str | None = None) -> Lane:
    """A target of the Makefile."""
    return Lane(target, ("make", "--no-print-directory", target), budget, after)


# Longest first: the last lane to start is a short one.
LANES = (
    make_lane("docs", 500),
    python_lane("exact", 600),
    python_lane("processes", 700),
    python_lane("spark", 500),
    make_lane("r-test-cluster", 400),
    make_lane("r-test-plain", 400),
    make_lane("r-test-local", 420),
    make_lane("r-check-python", 420, after="docs"),
    make_lane("r-check-no-python", 180, after="docs"),
    python_lane("frames", 300),
    python_lane("functions", 400),
    python_lane("models", 300),
    make_lane("lint", 180),
    python_lane("unit", 360),
    python_lane("machines", 600, waits=True),
    python_lane("hosts", 500, waits=True),
    python_lane("connect", 300, waits=True),
    python_lane("slurm", 300, waits=True),
)
FAST = (python_lane("unit", 120), make_lane("py-lint", 90))


def scale() -> float:
    """How much more time than its budget a lane gets on this machine."""
    began = time.perf_counter()
    sum(number * number for number in range(5_000_000))
    slower = max(1.0, (time.perf_counter() - began) / _REFERENCE_SECONDS)
    fewer_cores = max(1.0, SLOTS / (os.cpu_count() or 1))
    return _MARGIN * slower * fewer_cores * float(os.environ.get("TFDIST_TEST_PATIENCE", "1"))


def run_lanes(lanes: Sequence[Lane], factor: float, folder: Path) -> list[Ended]:
    """Run all lanes in the slots, in their order as far as what they need allows."""
    waiting, ended = list(lanes), list[Ended]()
    changed = threading.Condition()

    def next_lane(is_extra: bool) -> Lane | None:
        with changed:
            while waiting:
                needed = {lane.name for lane in lanes} - {one.lane.name for one in ended}
                only_waits = is_extra and any(lane.waits for lane in waiting)
                for lane in waiting:
                    if lane.after not in needed and (lane.waits or not only_waits):
                        waiting.remove(lane)
                        return lane
                changed.wait()
        return None

    def work(is_extra: bool) -> None:
        while lane := next_lane(is_extra):
            has_failed = {one.lane.name for one in ended if one.problem}
            try:
                if lane.after in has_failed:
                    found = Ended(lane, 0, f"not run: {lane.after} failed")
                else:
                    own = folder / lane.name
                    own.mkdir()
                    found = run_lane(lane, factor, own)
            except Exception as error:  # a full disk, say: the other lanes go on
                found = Ended(lane, 0, f"could not be run: {error!r}")
            with changed:
                ended.append(found)
                changed.notify_all()
                show(found)

    slots = [
        threading.Thread(target=work, args=(number == SLOTS,), daemon=True)
        for number in range(SLOTS + 1)
    ]
    for slot in slots:
        slot.start()
    try:
        for slot in slots:
            slot.join()
    finally:  # on Ctrl-C no other lane begins
        with changed:
            waiting.clear()
    return ended


def main() -> int:
    """Run the lanes that the command line names, all by default."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("lanes", nargs="*", help="lanes to run; all by default")
    parser.add_argument("--fast", action="store_true", help="no Spark, no R, no worker processes")
    parser.add_argument("--record", action="store_true", help=f"write {RECORD.name}")
    arguments = parser.parse_args()
    known = {lane.name: lane for lane in (FAST if arguments.fast else LANES)}
    if unknown := ", ".join(set(arguments.lanes) - set(known)):
        parser.error(f"no lane {unknown}: there are {', '.join(known)}")
    lanes = [lane for name, lane in known.items() if name in (arguments.lanes or known)]
    BUILD.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A shell that runs this in the background has it ignore Ctrl-C, and so would the lanes.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="lanes-", ignore_cleanup_errors=True) as folder:
        try:
            factor = scale()
            ended = run_again(run_lanes(lanes, factor, Path(folder)), factor, Path(folder))
        finally:  # also on Ctrl-C: lanes are sessions of their own, which the terminal leaves alone
            end_all(Path(folder))
    seconds = time.monotonic() - began
    record(ended, seconds, BUILD / "durations.json")
    if arguments.record:
        record(ended, seconds, RECORD)
    return conclude(ended, seconds)


if __name__ == "__main__":
    sys.exit(main())
