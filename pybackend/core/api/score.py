"""Evaluate a model, or predict with it, on several workers."""

from __future__ import annotations

from typing import Any, Unpack, cast

import numpy as np

from pybackend.core.api.calls import (
    EvaluationCall,
    PredictionCall,
    Target,
    explain_arguments,
    take_options,
)
from pybackend.core.api.datasets import read_data
from pybackend.core.api.in_process import shape_outputs, shows_columns
from pybackend.core.api.model import is_keras_model
from pybackend.core.api.model_columns import check_levels, check_on_missing, check_type
from pybackend.core.api.request import prepare
from pybackend.core.api.result import TrainResult
from pybackend.core.data import arrays
from pybackend.core.data.columns import ColumnSpec
from pybackend.core.data.datasets import is_dataset
from pybackend.core.data.frames import FrameRows, has_frames
from pybackend.core.errors import InputError
from pybackend.core.job.call_options import (
    EvaluationOptions,
    PredictionOptions,
    TablePredictionOptions,
)
from pybackend.core.job.job import EvaluationJob, ModelJob, PredictionJob
from pybackend.core.job.report import read_metrics
from pybackend.core.job.value_codec import decode_value
from pybackend.core.launchers import count_workers, is_spark_frame, launcher_for
from pybackend.core.words import setting, term


@explain_arguments
@take_options
def barrier_evaluate(
    spark: Target,
    model: Any,
    data: Any,
    **options: Unpack[EvaluationOptions],
) -> dict[str, float]:
    """Evaluate a model on several workers, with the same values as in one process.

    Parameters
    ----------
    model
        As in `barrier_train`, or the `TrainResult` of a training run. The model must be compiled.
        With a `TrainResult`, ``features`` and the column options default to those of that training
        run; ``label`` and ``weight`` are not taken from it.
    spark, data
        As in `barrier_train`.
    data_options
        As in `barrier_train`. A text label needs the ``categories`` used in training, which a
        `TrainResult` has. Rows are read once, so ``in_memory`` makes no difference.

    Returns
    -------
    dict
        ``loss`` and each metric by its name.

    Raises
    ------
    InputError, ClusterError, WorkerFailedError, SerializationError
        As in `barrier_train`.

    Notes
    -----
    The states of the metrics are summed over the workers, so an AUC is computed over all rows.

    As in Keras itself, some values depend on which rows share a batch: a loss that compares rows or
    that leaves out masked time steps, a metric computed from one batch, and the loss of each of
    several outputs, which is a mean over batches. These values are those of Keras's ``evaluate``
    with batches of ``workers * batch_size`` rows. Workers read ranges of files and partitions of a
    Spark DataFrame, so their batches have other rows together.
    """
    launcher = launcher_for(spark)
    options["workers"] = count_workers(launcher, options.get("workers"))
    call = EvaluationCall(model=model, options=options)
    request = prepare(
        EvaluationJob,
        call,
        lambda columns, job: {"train": read_data(launcher, data, "data", columns, job)},
    )
    # A metric such as F1Score has a value for each class.
    return read_metrics(request.run(launcher).reports[0], (int, float, list))


@explain_arguments
@take_options
def barrier_predict(
    spark: Target,
    model: Any,
    x: Any,
    **options: Unpack[PredictionOptions],
) -> Any:
    """Predict with a model on several workers.

    Parameters
    ----------
    x
        Inputs: an array with one entry per row, a list or dict of arrays, or a data frame. All
        columns of a data frame are inputs; with a `TrainResult`, those used in training.
    model
        As in `barrier_train`, or the `TrainResult` of a training run. It need not be compiled.
    spark
        As in `barrier_train`.

    Returns
    -------
    pandas.DataFrame, numpy array, or a list or dict of arrays
        As `TrainResult.predict` returns for ``x``: one entry per row, in the order of ``x``.

    Raises
    ------
    InputError, ClusterError, WorkerFailedError, SerializationError
        As in `barrier_train`.
    """
    kind = options.get("type")
    check_type(kind)
    check_levels(options.get("levels"))
    launcher = launcher_for(spark)
    options["workers"] = count_workers(launcher, options.get("workers"))
    call = PredictionCall(model=model, options=cast("TablePredictionOptions", options))
    skips_incomplete = check_on_missing(call.options["on_missing"])
    reader = _InputReader(x, skips_incomplete=skips_incomplete)
    request = prepare(PredictionJob, call, reader.read)
    here = _build(request.model) if shows_columns(kind, x) else None
    if request.datasets:
        outcome = request.run(launcher)
        parts = [None if r.value is None else decode_value(r.value) for r in outcome.reports]
        outputs = _interleave(parts, arrays.count_rows(request.datasets["train"]))
    else:
        outputs = _predict_nothing(request.model)
    known = model if isinstance(model, TrainResult) else None
    return shape_outputs(outputs, reader.complete, x, call, known, lambda: here)


def _build(model: Any) -> Any:
    """Return a model, whose outputs name the columns, before anything is computed.

    Raises
    ------
    InputError
        The function that builds it does not run in this session.
    """
    if is_keras_model(model):
        return model
    try:
        return model()
    except Exception as error:  # raised by the function
        raise InputError(
            f"the `model` function fails in this session ({error}), which needs the model's "
            f"outputs to name the columns: pass {setting(type='raw')}, or a model"
        ) from error


class _InputReader:
    """Read x, and record which of its rows get predictions; None: all rows."""

    def __init__(self, x: Any, *, skips_incomplete: bool) -> None:
        self._x = x
        self._skips_incomplete = skips_incomplete
        self.complete: Any = None

    def read(self, columns: ColumnSpec, job: ModelJob) -> dict[str, Any]:
        """Return the columns for launchers; no data set if there are no rows to predict."""
        if is_spark_frame(self._x):
            raise InputError(
                f"`x` is a {term('Spark DataFrame')}: use predict_spark(model, df), which adds the "
                "predictions to it"
            )
        if is_dataset(self._x):
            raise InputError(
                "`x` is a data set, whose batches workers cannot share here: pass arrays or a data "
                "frame, or use `predict` of the result or the model"
            )
        if has_frames(self._x):
            rows = FrameRows.of(
                (self._x,), columns, job.floatx, "x", skips_incomplete=self._skips_incomplete
            )
            self.complete, found = rows.complete, rows.columns
        else:
            found = arrays.flatten_inputs(self._x, job.floatx, may_be_empty=True)
        return {"train": found} if arrays.count_rows(found) else {}


def _predict_nothing(model: Any) -> Any:
    """Return a model's outputs for zero rows."""
    if not is_keras_model(model):
        raise InputError(
            "`x` has no rows, so no worker calls the `model` function and the shapes of its "
            "outputs are unknown: pass the model itself"
        )
    from pybackend.core.model.inputs_outputs import empty_outputs

    return empty_outputs(model)


def _interleave(parts: list[Any], rows: int) -> Any:
    """Return the rows in input order: rank r got every N-th row, starting at row r."""
    known = next(part for part in parts if part is not None)
    if isinstance(known, dict):
        return {
            key: _interleave([None if p is None else p[key] for p in parts], rows) for key in known
        }
    if isinstance(known, (list, tuple)):
        return [
            _interleave([None if p is None else p[place] for p in parts], rows)
            for place in range(len(known))
        ]
    with_rows = (part for part in parts if part is not None)
    arrays.check_row_shapes(with_rows, "the output of the model", "on different workers")
    together = np.empty((rows, *known.shape[1:]), known.dtype)
    for rank, part in enumerate(parts):
        if part is not None:
            together[rank :: len(parts)] = part
    return together
