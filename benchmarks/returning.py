"""Seconds to return a model of 100 MB from a Spark task to the driver.

Within a training, the return cannot be separated from the steps before it, so it is timed alone: a
barrier job whose first task already has the file and returns it as tfdist does, minus the same job
with an empty file. It is compared with a file that both sides reach, and with whole trainings of
one step.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from rounds import median_seconds
from standalone_session import WORKERS, standalone_session

import pybackend
from pybackend.core.job.report import WorkerReport
from pybackend.core.launchers.remote.task import receive_model
from pybackend.core.launchers.spark.barrier import collect_rows
from pybackend.core.launchers.spark.barrier_task import SCHEMA, has_sent, rows_to_return
from pybackend.core.launchers.spark.stage import driver_addresses
from pybackend.core.net.authentication import new_token
from pybackend.core.net.meeting import MeetingServer
from pybackend.core.net.meeting_client import MeetingClient

Table = dict[str, dict[str, float]]
BYTES = 100_000_000
# A dense layer of 5,000 inputs and outputs has 25 million weights: 100 MB.
WIDTH, TINY = 5000, 8


def model_return(rounds: int) -> dict[str, Table]:
    """Medians over interleaved rounds, after one that warms up.

    It runs in a separate process, because Spark's Java does not return memory.
    """
    command = [sys.executable, __file__, str(rounds)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment)
    tables: dict[str, Table] = json.loads(done.stdout)
    return tables


def _tables(rounds: int) -> dict[str, Table]:
    with (
        standalone_session() as session,
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
    ):
        size = f"a model of {BYTES // 1_000_000} MB"
        return {
            f"{size} from a task to the driver": _alone(session, Path(folder), rounds),
            f"training {size}, one step, {WORKERS} workers": _in_training(session, rounds),
        }


def _alone(session: Any, folder: Path, rounds: int) -> Table:
    model, empty, shared = (folder / name for name in ("model", "empty", "shared"))
    model.write_bytes(np.random.default_rng(0).bytes(BYTES))
    empty.touch()
    found = median_seconds(
        {
            "job without a model": lambda: _collected(session, empty),
            "over the task's connection": lambda: _digest(_sent(session, empty, model)),
            "in rows, if the driver cannot be reached": lambda: _digest(_collected(session, model)),
            "shared file": lambda: _digest(_through_file(session, empty, model, shared)),
        },
        rounds,
    )
    job = found["job without a model"]
    return {name: {"seconds": s, "above_the_job": s - job} for name, s in found.items()}


def _collected(session: Any, path: Path) -> bytes:
    """Return the content of a file that the first task reads and returns as a row."""
    return _job(session, lambda: path.read_bytes())


def _sent(session: Any, empty: Path, path: Path) -> bytes:
    """Return the content of a file that the first task sends to the driver."""
    token = new_token()
    with MeetingServer(driver_addresses(session)[0], token, WORKERS) as meeting:
        address = meeting.address

        def send() -> bytes:
            with MeetingClient(address, token, 0, 30.0) as client:
                client.require()
                has_sent(client, ("h5", path.read_bytes()))
            return empty.read_bytes()

        _job(session, send)
        meeting.drain(60)
        received = receive_model(meeting)
    assert received is not None
    return received[1]


def _through_file(session: Any, empty: Path, model: Path, shared: Path) -> bytes:
    """Return the content of a file that the first task copies to a disk of the driver."""

    def copy() -> bytes:
        with model.open("rb") as source, shared.open("wb") as target:
            shutil.copyfileobj(source, target)
            os.fsync(target.fileno())
        return empty.read_bytes()

    _job(session, copy)
    return shared.read_bytes()


def _job(session: Any, content: Callable[[], bytes]) -> bytes:
    """Run a barrier job with rows like tfdist's, and return the content of the first."""

    def task(batches: Iterable[Any]) -> Iterator[Any]:
        from pyspark import BarrierTaskContext

        rank = BarrierTaskContext.get().partitionId()
        for _ in batches:
            pass
        model = ("h5", content()) if rank == 0 else None
        yield from rows_to_return(WorkerReport(rank, "here", 0), model)

    frame = session.range(0, WORKERS, 1, WORKERS).mapInArrow(task, SCHEMA, barrier=True)
    pieces = [row["model"] for row in collect_rows(frame)]
    return b"".join(piece for piece in pieces if piece is not None)


def _digest(content: bytes) -> str:
    """Return what `pybackend.barrier_train` compares with the digest in the task's report."""
    assert len(content) == BYTES
    return hashlib.sha256(content).hexdigest()


def _in_training(session: Any, rounds: int) -> Table:
    """Time whole calls with a large and a tiny model; locally, a model returns as a file."""
    calls = median_seconds(
        {
            f"{place}, {size}": lambda spark=spark, width=width: _train(spark, width)
            for place, spark in (("Spark", session), ("this machine", "local"))
            for size, width in (("tiny model", TINY), ("large model", WIDTH))
        },
        rounds,
    )
    table = {name: {"seconds": s, "above_tiny": 0.0} for name, s in calls.items()}
    for place in ("Spark", "this machine"):
        extra = calls[f"{place}, large model"] - calls[f"{place}, tiny model"]
        table[f"{place}, large model"]["above_tiny"] = extra
    return table


def _train(spark: Any, width: int) -> None:
    """Train one step, so that the launch and the return of the model dominate the call."""

    def build() -> Any:
        import keras

        layer = keras.layers.Dense(width, use_bias=False)
        model = keras.Sequential([keras.Input((width,)), layer])
        model.compile(keras.optimizers.SGD(1e-4), "mse")
        return model

    rows = np.zeros((2 * WORKERS, width), np.float32)
    pybackend.barrier_train(
        spark, build, (rows, rows), workers=WORKERS, batch_size=len(rows), verbose=0
    )


if __name__ == "__main__":
    print(json.dumps(_tables(int(sys.argv[1]))))
