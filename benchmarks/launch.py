"""Seconds from a call to its result for a job that does nothing, beside the bare machinery."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import pybackend

WORKERS = 2


def measure(rounds: int) -> dict[str, dict[str, float]]:
    """Medians over interleaved rounds, after one that warms up."""
    with _spark() as session:
        cases: dict[str, Callable[[], Any]] = {
            "two bare Python processes": _bare_processes,
            "tfdist no-op, local": lambda: _no_op("local"),
            "bare Spark barrier job": lambda: _bare_barrier(session),
            "tfdist no-op, Spark": lambda: _no_op(session),
        }
        found: dict[str, list[float]] = {name: [] for name in cases}
        for number in range(rounds + 1):
            for name, case in cases.items():
                began = time.perf_counter()
                case()
                if number:
                    found[name].append(time.perf_counter() - began)
    return {name: {"seconds": float(np.median(times))} for name, times in found.items()}


def _no_op(spark: Any) -> None:
    pybackend.barrier_run(spark, lambda context: context.rank, workers=WORKERS, verbose=0)


def _bare_processes() -> None:
    for process in [subprocess.Popen([sys.executable, "-c", "pass"]) for _ in range(WORKERS)]:
        process.wait()


def _bare_barrier(session: Any) -> None:
    session.range(0, WORKERS, 1, WORKERS).mapInArrow(
        lambda batches: batches, "id long", barrier=True
    ).collect()


def _spark() -> Any:
    import os

    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session = (
        SparkSession.builder.master(f"local-cluster[{WORKERS},1,1024]")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    return session
