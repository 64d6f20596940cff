"""Evaluating and predicting by several workers, with the figures and the order of one process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from pybackend.collective import Collective
from pybackend.data.arrays import nest
from pybackend.data.rows import Rows, SpooledRows, make_zero_row
from pybackend.engine.feed import Feed
from pybackend.engine.metrics import over_all_rows
from pybackend.engine.sources import Sources
from pybackend.job.job import Job
from pybackend.job.messages import Order
from pybackend.job.values import encode_value
from pybackend.model.inputs import reshape_rows
from pybackend.model.load import load_job_model


class HeldOut:
    """Rows to evaluate a model on, dealt to the workers.

    Parameters
    ----------
    columns
        This worker's rows.
    counts
        Rows of every worker, by rank.
    """

    def __init__(self, columns: Rows, counts: Sequence[int], batch_size: int) -> None:
        self._counts = np.array(counts)
        self._columns = columns
        # Nothing is exchanged before the end: each worker takes the steps of its own rows.
        self._data = own_rows(columns, batch_size) if len(columns) else None

    def evaluate(self, model: Any, collective: Collective) -> dict[str, Any]:
        """Loss and metrics over all workers' rows; the same on every rank."""
        model.reset_metrics()
        logs = {}
        if self._data is None:
            build_metrics(model, self._columns)
        else:
            logs = model.evaluate(self._data, verbose=0, return_dict=True)
        return over_all_rows(model, logs, collective, self._counts)


def build_metrics(model: Any, columns: Rows) -> None:
    """Have Keras create the metrics' variables, as a first step with rows would."""
    x, y, weight = (*nest(make_zero_row(columns)), None)[:3]
    model.test_on_batch(x, y, sample_weight=weight)
    model.reset_metrics()


def own_rows(columns: Rows, batch_size: int) -> Any:
    """Batches of one worker's rows, in their order."""
    return Feed(columns, [len(columns)], 0, batch_size).dataset()


@dataclass(frozen=True)
class Scored:
    """What a worker reports of its part, its rows, and the seconds that it took."""

    value: Any
    rows: int
    seconds: float


def score(job: Job, collective: Collective, order: Order, folder: Path, sources: Sources) -> Scored:
    """Do a worker's part of a `barrier_evaluate` or `barrier_predict` job.

    The value of ``"evaluate"`` are the figures over all rows; of ``"predict"`` the outputs of its
    own rows, None where it has none.
    """
    model = load_job_model(job, folder).model
    counts = {**order.counts, **sources.settled(job, collective, folder)}
    columns = reshape_rows(SpooledRows(folder / "train"), model)
    began = time.monotonic()
    found: Any = None
    if job.kind == "evaluate":
        found = HeldOut(columns, counts["train"], job.batch_size).evaluate(model, collective)
    elif len(columns):
        outputs = model.predict(own_rows(columns, job.batch_size), verbose=0)
        found = encode_value(keras.tree.map_structure(_plain_numbers, outputs))
    return Scored(found, len(columns), time.monotonic() - began)


def _plain_numbers(array: Any) -> Any:
    """NumPy has no bfloat16 of its own; float32 holds its values."""
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
