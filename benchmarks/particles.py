"""Pipeline of examples/particles by phases, with models trained by two workers and by one process.

It uses no dropout, whose masks differ by worker, so the AUCs must be equal.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "particles"))

import main as example
from models import INPUTS
from reading import read_parquet
from scores import mean_area
from spark_session import send_code, start_session

EVENTS, EPOCHS, WORKERS = 20_000, 12, 2
Table = dict[str, dict[str, float]]


def measure() -> dict[str, Table]:
    """Run the pipeline once."""
    phases: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        with start_session(WORKERS) as session:
            send_code(session)
            prepared = example.prepare_files(session, Path(folder), EVENTS, 1, phases)
        trained = _train(prepared)
    return {
        f"particles, {EVENTS} events, 2 cores of Spark": {
            phase: {"seconds": seconds} for phase, seconds in phases.items()
        },
        f"particles, {prepared.rows} rows, {EPOCHS} epochs of 128 rows per worker": trained,
    }


def _train(prepared: Any) -> Table:
    from training import Plan, predict, train, train_in_one_process

    inputs, labels = read_parquet(prepared.test)
    plan = Plan(epochs=EPOCHS, dropout=0.0)
    table = {}
    for name in INPUTS:
        began = time.perf_counter()
        result = train(name, prepared.files, WORKERS, plan)
        seconds = time.perf_counter() - began
        steps = max(worker.seconds for worker in result.workers)
        began = time.perf_counter()
        alone = train_in_one_process(name, prepared.files, WORKERS, plan)
        alone_seconds = time.perf_counter() - began
        for who, model, whole, own in (
            (f"{WORKERS} workers", result.model, seconds, steps),
            ("one process", alone, alone_seconds, alone_seconds),
        ):
            table[f"{name}, {who}"] = {
                "100 x AUC": 100 * mean_area(labels, predict(name, model, inputs)),
                "call, s": whole,
                "training, s": own,
            }
    return table
