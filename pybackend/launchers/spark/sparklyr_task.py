"""One worker of a stage that sparklyr runs: R on an executor starts this, and this starts R.

The first R is sparklyr's, and tells what it knows of its place. The second is the worker: R with
Python and TensorFlow embedded, started and watched as every other worker is.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import zipfile
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle

from pybackend.data.text import batches_of
from pybackend.launchers.spark.barrier_task import Task
from pybackend.net.meeting import MeetingClient

TASK = "task.pkl"
# Names of what a worker sends to the driver; the model's is followed by its format.
REPORT = "report"
MODEL = "model."


@dataclass(frozen=True)
class Place:
    """Where a worker is, in the terms of ``pyspark.BarrierTaskContext``."""

    rank: int
    addresses: list[str]
    cores: int
    meeting: MeetingClient

    def partitionId(self) -> int:
        """The rank."""
        return self.rank

    def getTaskInfos(self) -> list[Any]:
        """Where the executors of all tasks are, as ``host:port``."""
        return [SimpleNamespace(address=address) for address in self.addresses]

    def allGather(self, message: str) -> list[str]:
        """Everyone's message by rank."""
        return self.meeting.gather(message)

    def cpus(self) -> int:
        """Cores of a task."""
        return self.cores

    def resources(self) -> dict[str, Any]:
        """Nothing: R is not told which GPUs are the task's."""
        return {}


def main(archive: str, rows: str, options: str) -> None:
    """Run one worker.

    Parameters
    ----------
    archive
        The driver's: this package, and a pickled `Task`.
    rows
        File of this worker's rows, as `pybackend.data.text` writes them.
    options
        JSON of ``rank``, ``addresses``, ``cores`` and ``rscript``.

    Raises
    ------
    RuntimeError
        Where the worker failed, as in `Task.work`.
    ClusterError
        Where the driver cannot be reached.
    """
    told = json.loads(options)
    with zipfile.ZipFile(archive) as packed:
        # Made by the driver of its own objects, and brought by Spark, as Spark's own tasks are.
        task: Task = cloudpickle.loads(packed.read(TASK))
    assert task.driver is not None
    # Leaving this way ends the worker and removes its folder.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("the driver has ended the job"))
    meeting = MeetingClient(task.driver, task.token, told["rank"], _end_this_process)
    try:
        place = Place(told["rank"], told["addresses"], told["cores"], meeting)
        report, model = task.work(place, batches_of(Path(rows)), meeting, told["rscript"])
        if model is not None:
            meeting.send(MODEL + model[0], model[1])
        meeting.send(REPORT, json.dumps(asdict(report)).encode())
    finally:
        meeting.close()


def _end_this_process() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
