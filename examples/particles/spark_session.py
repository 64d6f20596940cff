"""Spark session of the pipeline, which generates events, features and files."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


@contextmanager
def start_session(cores: int) -> Iterator[Any]:
    """Start a Spark session in this process, and stop it at the end of the context."""
    from pyspark.sql import SparkSession

    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    session = (
        SparkSession.builder.master(f"local[{cores}]")
        .appName("particles")
        .config("spark.driver.bindAddress", "127.0.0.1")
        .config("spark.driver.host", "127.0.0.1")
        .config("spark.driver.memory", "2g")
        .config("spark.sql.shuffle.partitions", str(2 * cores))
        .config("spark.ui.enabled", "false")
        .config("spark.ui.showConsoleProgress", "false")
        .getOrCreate()
    )
    session.sparkContext.setLogLevel("ERROR")
    try:
        yield session
    finally:
        session.stop()


def send_code(session: Any) -> None:
    """Let Spark's tasks import the files of this example."""
    for name in ("layout", "generate", "features"):
        session.sparkContext.addPyFile(str(HERE / f"{name}.py"))
