"""Peak memory of a worker, and of its Spark task, by the megabytes of rows of the worker.

Each value is measured in a separate process, minus the value with 1 MB of rows. ``peak_mb`` is the
resident memory (VmHWM). It includes pages of files mapped into memory, which the system can
reclaim; ``own_mb`` does not, and is sampled every few milliseconds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from feed import WIDTH, spool, visited

Table = dict[str, dict[str, float]]
MEGABYTES = (50, 500)
BATCH = 64
_ROW_BYTES = WIDTH + 8
_SAMPLE_SECONDS = 0.005
_KINDS = {
    "worker": "training worker",
    "in_memory": "training worker, in_memory=True",
    "task": "Spark task's Python",
}
_SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
}


def memory() -> dict[str, Table]:
    """Measure each case once, because a peak covers the lifetime of a process."""
    return {
        "peak memory above that with 1 MB of rows": {
            f"{name}, {size} MB of rows": difference
            for kind, name in _KINDS.items()
            for size, difference in _above_base(kind).items()
        }
    }


def _above_base(kind: str) -> dict[int, dict[str, float]]:
    base = _process(kind, 1)
    return {
        size: {figure: value - base[figure] for figure, value in _process(kind, size).items()}
        for size in MEGABYTES
    }


def _process(kind: str, megabytes: int) -> dict[str, float]:
    rows = megabytes * 1_000_000 // _ROW_BYTES
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        if kind != "task":  # a process that is not measured writes the rows
            _in_process("rows", rows, folder)
        figures: dict[str, float] = json.loads(_in_process(kind, rows, folder))
    return figures


def _in_process(what: str, rows: int, folder: str) -> bytes:
    """Run a function of `_PARTS` in a separate process and return its output."""
    return subprocess.run(
        [sys.executable, __file__, what, str(rows), folder],
        stdout=subprocess.PIPE,
        check=True,
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "PYSPARK_PYTHON": sys.executable,
            "TF_CPP_MIN_LOG_LEVEL": "3",
        },
    ).stdout


def _write_rows(rows: int, folder: Path) -> None:
    spool(_batches(rows), folder)


def _batches(rows: int, size: int = 10_000) -> Iterator[Any]:
    """Yield Arrow batches like those that Spark passes to a task."""
    import pyarrow as pa

    rng = np.random.default_rng(0)
    for first in range(0, rows, size):
        pixels = rng.integers(0, 256, (min(size, rows - first), WIDTH), np.uint8)
        images = pa.array([row.tobytes() for row in pixels], pa.binary())
        labels = pa.array(np.zeros(len(pixels), np.int64))
        yield pa.RecordBatch.from_arrays([images, labels], names=["image", "label"])


def _worker(rows: int, folder: Path, in_memory: bool = False) -> None:
    """Read one shuffled epoch of rows that are already stored."""
    with _peak() as found:
        assert visited(folder / "train", BATCH, in_memory) == rows
    print(json.dumps(found))


def _task(rows: int, folder: Path) -> None:
    """Run a Spark task that stores its partition's rows; Java creates them, Python only reads."""
    from pyspark.sql import SparkSession

    from pybackend.core.launchers import small_batches

    def keep(batches: Iterable[Any]) -> Iterator[Any]:
        import pyarrow as pa

        with _peak() as found:
            spool(batches, folder)
        yield pa.RecordBatch.from_arrays([pa.array([json.dumps(found)])], names=["found"])

    builder = SparkSession.builder.master("local[1]").config(map=_SETTINGS)
    session = builder.config("spark.local.dir", str(folder)).getOrCreate()
    image = f"encode(rpad(cast(id AS string), {WIDTH}, 'x'), 'utf-8') AS image"
    frame = session.range(0, rows, 1, 1).selectExpr(image, "id AS label")
    with small_batches(session):
        print(frame.mapInArrow(keep, "found string", barrier=True).collect()[0]["found"])
    session.stop()


@contextmanager
def _peak() -> Iterator[dict[str, float]]:
    """Fill in this process's peaks in MB: resident over its lifetime, and its own meanwhile."""
    found: dict[str, float] = {}
    samples = [_status("RssAnon")]
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_SAMPLE_SECONDS):
            samples.append(_status("RssAnon"))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        ended.set()
        thread.join()
    found.update(peak_mb=_status("VmHWM"), own_mb=max(samples))


def _status(figure: str) -> float:
    kilobytes = re.search(rf"{figure}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert kilobytes is not None
    return int(kilobytes[1]) * 1024 / 1e6


_PARTS = {
    "rows": _write_rows,
    "worker": _worker,
    "in_memory": partial(_worker, in_memory=True),
    "task": _task,
}

if __name__ == "__main__":
    _PARTS[sys.argv[1]](int(sys.argv[2]), Path(sys.argv[3]))
