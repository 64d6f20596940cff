"""Evaluation over the rows of all workers, in training and by itself, and prediction."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.core.collective import Collective, all_sum
from pybackend.core.data.arrays import nest
from pybackend.core.data.rows import Rows, StoredRows, make_zero_row
from pybackend.core.engine.equal_state import check_structure, find_differing_weights
from pybackend.core.engine.row_batches import RowBatches
from pybackend.core.engine.statistics.global_batch import (
    NOTHING,
    GatheredRows,
    GlobalBatch,
    OverBatch,
    check_runs_eagerly,
)
from pybackend.core.engine.statistics.metrics import (
    StepMeans,
    ValidStepCounter,
    build_losses,
    combine_logs,
    find_step_means,
)
from pybackend.core.engine.statistics.probes import choose_rows, find_over, probe_metrics
from pybackend.core.engine.step_changes import (
    Position,
    StepCalls,
    StepOrSkip,
    count_rows,
    override,
    override_each,
)
from pybackend.core.errors import InputError
from pybackend.core.job.job import ModelJob
from pybackend.core.job.messages import Emit
from pybackend.core.job.value_codec import encode_value
from pybackend.core.model.inputs_outputs import reshape_rows
from pybackend.core.model.labels import check_has_labels
from pybackend.core.model.transfer import load_job_model
from pybackend.core.model.view import ModelView


class Validation:
    """Rows that the workers evaluate together: this worker's ``rows``, and ``counts`` by rank.

    ``over`` has the values that are computed from the rows of global batches, with ``batch_size``
    rows per worker. Raises `InputError` if the workers must synchronize each step of an evaluation,
    but cannot.
    """

    def __init__(
        self,
        view: ModelView,
        collective: Collective,
        rows: Rows,
        counts: Sequence[int],
        batch_size: int,
        over: OverBatch,
    ) -> None:
        self._model, self._collective = view.model, collective
        self._rows, self._counts = rows, np.array(counts)
        self._steps: StepsTogether | None = None
        # Workers exchange values only at the end: each takes the steps of its own rows.
        self._data = batch_rows(rows, batch_size) if len(rows) else None
        # Else a worker's metrics in a step do not depend on the rows of other workers.
        needs_others = over != NOTHING or find_step_means(view.model) or view.has_masked_loss
        if collective.world_size > 1 and needs_others:
            batches = RowBatches(rows, list(counts), collective.rank, batch_size)
            if over != NOTHING:
                check_runs_eagerly(view.model, batches.begins_empty)
            self._steps = StepsTogether(view, collective, batches, over)

    def evaluate(self, callbacks: Sequence[Any] = ()) -> dict[str, Any]:
        """Return loss and metrics over all workers' rows, equal on all ranks.

        Callbacks get these values at the end of the evaluation.
        """
        model = self._model
        model.reset_metrics()
        shared = self._steps.batch.variables if self._steps else []
        metrics: dict[str, Any] = {}

        def combine(logs: dict[str, Any]) -> None:
            metrics.update(combine_logs(model, logs, self._collective, self._counts, shared))
            logs.clear()
            logs.update(metrics)

        # First of the callbacks: the others get the metrics over all ranks.
        first = keras.callbacks.LambdaCallback(on_test_end=combine)
        hooks = keras.callbacks.CallbackList([first, *callbacks])
        if self._steps is not None:
            self._steps.evaluate(hooks)
        elif self._data is None:
            hooks.on_test_begin()
            build_metrics(model, self._rows)
            hooks.on_test_end({})
        else:
            model.evaluate(self._data, verbose=0, callbacks=hooks)
        return metrics


def build_metrics(model: Any, rows: Rows) -> None:
    """Make Keras create the metrics' variables, as a first step with rows would."""
    model.evaluate(tf.data.Dataset.from_tensors(nest(make_zero_row(rows))), verbose=0)
    model.reset_metrics()


def batch_rows(rows: Rows, batch_size: int) -> Any:
    """Return batches of one worker's rows, in row order."""
    return RowBatches(rows, [len(rows)], 0, batch_size).dataset()


class StepsTogether:
    """Evaluation of global batches, with steps that are synchronized with the other workers."""

    def __init__(
        self, view: ModelView, collective: Collective, batches: RowBatches, over: OverBatch
    ) -> None:
        self._model = model = view.model
        self._batches, self._collective = batches, collective
        self._calls = StepCalls()
        self._position = Position(batches)
        self._gathered = GatheredRows(collective, self._calls, batches.find_order)
        self.batch = GlobalBatch(model, self._gathered, self._calls, over)
        # With masks, a worker's loss is not a mean over its rows.
        is_masked = view.has_masked_loss and not over.loss
        self._valid = ValidStepCounter(model) if is_masked else None
        self._means = StepMeans(model, self._calls, self._count_rows)
        self._function: Any = None

    def evaluate(self, hooks: Any) -> None:
        test_step = self._model.test_step

        def step(data: Any) -> Any:
            self._calls.begin(count_rows(data))
            share = self._means.compute_share()
            with self.batch.active(), self._means.weigh(share):
                return test_step(data)

        def skip() -> None:
            with self.batch.active():
                self._calls.replace(self._take_part)

        self._position.begin_epoch()
        self._gathered.step = 0
        model = self._model
        skips = self._batches.may_be_empty
        together = StepOrSkip(model, step, skip) if skips else step
        averaged = [] if self._valid is None else [model]
        with (
            self.batch.install(),
            self._means.install(),
            override_each(averaged, "compute_loss", self._average),
            override(model, "jit_compile", False),
            override(model, "test_step", together),
            # Evaluations by callbacks use their own function; this one is traced once.
            override(model, "test_function", self._function),
        ):
            try:
                model.evaluate(self._batches.dataset(), verbose=0, callbacks=hooks)
            except tf.errors.OpError as error:
                raise self._calls.error or error from None
            self._function = model.test_function

    def _take_part(self) -> None:
        """Take part in a step without rows, on a worker that runs eagerly and never had rows."""
        self._means.compute_share()
        if self._valid is not None:
            self._compute_mean(tf.zeros([]), 0.0)

    def _average(self, model: Any, compute_loss: Callable[..., Any]) -> Any:
        """Make a model's ``compute_loss`` a mean over workers, weighted by unmasked steps."""
        valid = self._valid
        assert valid is not None
        watched = valid.watch(model, compute_loss)

        def averaged(*args: Any, **options: Any) -> Any:
            own = watched(*args, **options)
            weight = valid.weight(self._calls.rows)
            mean = self._compute_mean(own, weight)
            self._calls.record(lambda: self._compute_mean(tf.zeros_like(own), 0.0))
            return mean

        averaged.__signature__ = inspect.signature(compute_loss)  # type: ignore[attr-defined]
        return averaged

    def _compute_mean(self, loss: Any, weight: Any) -> Any:
        def compute(loss: Any, weight: Any) -> Any:
            total, weights = all_sum(self._collective, [weight * loss, weight])
            return np.asarray(total / weights if weights else 0.0, loss.dtype)

        given = [loss, tf.convert_to_tensor(weight, tf.float32)]
        return self._calls.call(compute, given, [tf.TensorSpec([], loss.dtype)])[0]

    def _count_rows(self, rows: int) -> float:
        """Return the number of rows in the current step's global batch; called once per step."""
        total = self._position.total_rows
        self._position.advance()
        return float(total or 0)


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
    the worker's own rows, or None if it has none. ``counts`` has the rows of every worker, by rank,
    of the data sets in the folder; ``sent`` is as in `load_job_model`.
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
        own = rows, counts["train"], job.batch_size, over
        value = Validation(view.renewed(), collective, *own).evaluate()
    elif len(rows):
        outputs = model.predict(batch_rows(rows, job.batch_size), verbose=0)
        value = encode_value(keras.tree.map_structure(_widen_bfloat16, outputs))
    return Score(value, len(rows), time.monotonic() - began)


def _check_alike(model: Any, collective: Collective) -> None:
    """Raise `InputError` if the workers built or loaded different models."""
    if collective.world_size == 1:
        return
    check_structure(model, collective)
    if differing := find_differing_weights(model, collective):
        raise InputError(
            f"the weights of worker {', '.join(map(str, differing))} differ from those of worker 0 "
            f"({next(iter(differing.values()))}): all workers must have the same model. A function "
            "that builds it must load its weights, or set a seed"
        )


def _widen_bfloat16(array: Any) -> Any:
    # NumPy lacks bfloat16, so nothing could decode it.
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array
