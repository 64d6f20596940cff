"""One worker's part of an evaluation or prediction, with the results of a single process."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from pybackend.core.collective import Collective
from pybackend.core.data.rows import StoredRows
from pybackend.core.engine.probes import choose_rows, find_over, probe_metrics
from pybackend.core.engine.state import check_structure, find_differing_weights
from pybackend.core.engine.step_means import build_losses
from pybackend.core.engine.validation import Validation, batch_rows
from pybackend.core.errors import InputError
from pybackend.core.job.job import ModelJob
from pybackend.core.job.messages import Emit
from pybackend.core.job.value_codec import encode_value
from pybackend.core.model.inputs_outputs import reshape_rows
from pybackend.core.model.labels import check_has_labels
from pybackend.core.model.transfer import load_job_model
from pybackend.core.model.view import ModelView


@dataclass(frozen=True)
class Score:
    """Result of one worker: its value, its number of rows, and how many seconds it took."""

    value: Any
    rows: int
    seconds: float


def score(
    job: ModelJob,
    collective: Collective,
    counts: Mapping[str, Sequence[int]],
    folder: Path,
    emit: Emit,
    sent: dict[str, Any] | None = None,
) -> Score:
    """Do a worker's part of a `barrier_evaluate` or `barrier_predict` job.

    For ``"evaluate"`` the value is the metrics over all rows; for ``"predict"``, the outputs for
    the worker's own rows, or None if it has none.

    Parameters
    ----------
    counts
        Rows of every worker, by rank, of the data sets in the folder.
    sent
        As in `load_job_model`.
    """
    model = load_job_model(job, folder, sent).model
    _check_alike(model, collective)
    rows = reshape_rows(StoredRows(folder / "train"), model)
    began = time.monotonic()
    value: Any = None
    if job.kind == "evaluate":
        check_has_labels(model, rows.spec, "data", trains=False)
        if job.workers > 1:
            build_losses(ModelView(model), rows)
        tried = choose_rows(model, rows, job)
        metrics = probe_metrics(model, tried, job, collective)
        view = ModelView(model)  # both of these may have created parts
        over = find_over(view, tried, metrics, job, collective, emit)
        validation = Validation(rows, counts["train"], job.batch_size, over)
        validation.prepare(view.renewed(), collective)
        value = validation.evaluate(model, collective)
    elif len(rows):
        outputs = model.predict(batch_rows(rows, job.batch_size), verbose=0)
        value = encode_value(keras.tree.map_structure(_widen_bfloat16, outputs))
    return Score(value, len(rows), time.monotonic() - began)


def _check_alike(model: Any, collective: Collective) -> None:
    """Raise an error if the workers built or loaded different models."""
    if collective.world_size == 1:
        return
    check_structure(model, collective)
    differing = find_differing_weights(model, collective)
    if differing:
        raise InputError(
            f"the weights of worker {', '.join(map(str, differing))} differ from those of worker 0 "
            f"({next(iter(differing.values()))}): all workers must have the same model. A function "
            "that builds it must load its weights, or set a seed"
        )


def _widen_bfloat16(array: Any) -> Any:
    """Convert bfloat16, which NumPy lacks, to float32."""
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
