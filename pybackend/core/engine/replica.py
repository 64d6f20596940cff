"""One worker's replica of the model: built once, along with everything determined about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from pybackend.core.collective import Collective
from pybackend.core.data.arrays import flatten, nest
from pybackend.core.data.rows import Rows, ShardedRows, StoredRows, make_zero_row
from pybackend.core.engine.evaluation import Validation, build_metrics
from pybackend.core.engine.row_batches import Batches, PipelineBatches, RowBatches
from pybackend.core.engine.save import SavingPlan, plan_saving
from pybackend.core.engine.statistics.global_batch import (
    NOTHING,
    OverBatch,
    check_runs_eagerly,
    find_compiled_metrics,
)
from pybackend.core.engine.statistics.metrics import build_losses
from pybackend.core.engine.statistics.probes import (
    MetricsKind,
    choose_rows,
    find_over,
    probe_metrics,
)
from pybackend.core.errors import InputError
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Emit, Note
from pybackend.core.job.worker_options import Exchange
from pybackend.core.machine import number_machine
from pybackend.core.machine.capacity import read_free_memory
from pybackend.core.model.callbacks import check_callbacks, check_sharded_callbacks
from pybackend.core.model.checks import check_model
from pybackend.core.model.inputs_outputs import (
    build_by_batch,
    check_input_names,
    check_output_names,
    reshape_rows,
)
from pybackend.core.model.labels import check_has_labels, check_labels
from pybackend.core.model.transfer import LoadedModel, describe_inputs
from pybackend.core.model.view import ModelView, has_own
from pybackend.core.words import show_bytes

# Share of the free memory: the rest is for the model and other processes.
_SHARE = 0.5
_ABOUT_WRAPPING = (
    "with these `steps_per_epoch`, the rows run out within an epoch: it continues with the first "
    "ones, where Keras's `fit` ends it early"
)
_ABOUT_METRICS = (
    "some of the metrics are not sums over rows: in each step the workers exchange their outputs, "
    "and compute the metrics over all rows"
)
_ABOUT_UNTRIED_METRICS = (
    "the check of the metrics on some rows failed: their variables are summed over the workers, "
    "which is correct only for sums and counts"
)
_ABOUT_UNEVEN = (
    "the arrays of a batch have different numbers of rows: gradients are weighted by the rows of "
    "`y`, which is exact if the loss is a mean over these; no steps are audited"
)


@dataclass(frozen=True)
class Replica:
    """Model and rows of one worker, ready to train.

    Attributes
    ----------
    view
        The model with all layers and weights, as it was before the first step.
    batches
        Batches of each epoch.
    rows
        The training rows, or some similar ones for a ``tf.data.Dataset``.
    inputs
        Description of the model's inputs, from `describe_inputs`.
    metrics
        Whether the metrics passed to ``compile`` can be summed over the workers.
    plan
        How rank 0 writes the trained model; None on other ranks.
    validation, validation_rows
        The validation, and its rows; None without validation data.
    """

    job: TrainingJob
    collective: Collective
    emit: Emit
    loaded: LoadedModel
    view: ModelView
    batches: Batches
    rows: Rows
    callbacks: list[Any]
    inputs: Any
    metrics: MetricsKind
    plan: SavingPlan | None = None
    validation: Validation | None = None
    validation_rows: Rows | None = None

    @property
    def model(self) -> Any:
        return self.loaded.model

    @property
    def rank(self) -> int:
        return self.collective.rank


def make_replica(
    job: TrainingJob,
    collective: Collective,
    counts: Mapping[str, list[int]],
    folder: Path,
    emit: Emit,
    loaded: LoadedModel,
    stream: Any,
    seed: Callable[[int], None],
) -> Replica:
    """Build a worker's model for its rows, check both, and check metrics and losses on some rows.

    ``counts``, ``folder``, ``emit`` and ``stream`` are as in `train`. ``seed`` seeds random numbers
    differently on each rank: it is called with the rank once everything that must be equal has been
    created.
    """
    model, rank = loaded.model, collective.rank
    stores = [folder / name for name in counts if (folder / name).is_dir()]
    in_memory = job.in_memory and fit_in_memory(stores, job.resources.bytes, collective, emit)
    batches, rows = _make_batches(job, collective, counts, folder, model, stream, in_memory)
    if batches.is_uneven and job.workers > 1:
        emit(Note(_ABOUT_UNEVEN))
    if isinstance(batches, RowBatches) and batches.begins_again(job.epochs - job.initial_epoch):
        emit(Note(_ABOUT_WRAPPING))
    callbacks = list(loaded.extras.get("callbacks") or [])
    check_callbacks(callbacks)
    if job.shards_optimizer:
        check_sharded_callbacks(callbacks)
    inputs = build_variables(model, rows, with_optimizer=not job.shards_optimizer)
    view = ModelView(model)
    check_model(view, job)
    tried = choose_rows(model, rows, job)
    if tried is not None:
        check_labels(model, flatten(tried), "data", names_rows=False)
    metrics = probe_metrics(model, tried, job, collective)
    view = view.renewed()  # the check of the metrics has called the model
    over = OverBatch(loss=job.has_global_loss, metrics=metrics == "not sums")
    if job.workers > 1 and isinstance(job.exchange, Exchange):
        if metrics == "not sums":
            emit(Note(_ABOUT_METRICS))
        elif metrics == "unknown" and find_compiled_metrics(model):
            emit(Note(_ABOUT_UNTRIED_METRICS))
        if over != NOTHING or has_own(model, "train_step") or view.synchronized:
            check_runs_eagerly(model, batches.begins_empty)
    # From here on, random numbers differ by rank: all that must be equal has been created.
    seed(rank)
    plan = plan_saving(loaded, view, inputs, job, emit) if rank == 0 else None
    if job.workers > 1:
        build_losses(view, rows)
    if model.run_eagerly and batches.may_be_empty:
        build_metrics(model, rows)
    view = view.renewed()  # so have these two
    replica = Replica(
        job, collective, emit, loaded, view, batches, rows, callbacks, inputs, metrics, plan
    )
    if "validation" not in counts:
        return replica
    own_rows = reshape_rows(StoredRows(folder / "validation", in_memory), model)
    if job.is_elastic:  # each worker has all rows
        own_rows = ShardedRows(own_rows, job.workers, rank)
    check_has_labels(model, own_rows.spec, "validation_data", trains=False)
    evaluated = find_over(view, tried, metrics, job, collective, emit)
    evaluated = OverBatch(over.loss or evaluated.loss, evaluated.metrics)
    own = own_rows, counts["validation"], job.batch_size, evaluated
    validation = Validation(view, collective, *own)
    return replace(replica, validation=validation, validation_rows=own_rows)


def fit_in_memory(
    folders: Iterable[Path], limit: int | None, collective: Collective, emit: Emit
) -> bool:
    """Return whether this worker's rows fit into memory; a note names workers whose rows do not.

    ``folders`` were written by a `RowStoreWriter`. ``limit`` is the number of bytes that the worker
    may use; None: all free memory.
    """
    needed = sum(file.stat().st_size for folder in folders for file in folder.iterdir())
    own = np.array([needed, read_free_memory(), number_machine()], np.float64)
    everyone = np.stack(collective.all_gather(own))
    # Workers of one machine share its free memory.
    neighbours = (everyone[:, 2:] == everyone[:, 2]).sum(axis=1)
    shares = np.minimum(everyone[:, 1] / neighbours, limit or np.inf) * _SHARE
    is_large = everyone[:, 0] > shares
    if is_large.any():
        first, *others = is_large.nonzero()[0].tolist()
        ranks = ", ".join(map(str, [first, *others][:-1]))
        named = f"workers {ranks} and {others[-1]}" if others else f"worker {first}"
        text = (
            f"in_memory: the rows of {named} stay on disk, in the same order: worker {first} has "
            f"{show_bytes(everyone[first, 0])} of rows, but may use only "
            f"{show_bytes(shares[first])} of memory"
        )
        emit(Note(text))
    return not is_large[collective.rank]


def _make_batches(
    job: TrainingJob,
    collective: Collective,
    counts: Mapping[str, list[int]],
    folder: Path,
    model: Any,
    stream: Any,
    in_memory: bool,
) -> tuple[Batches, Rows]:
    """Return the local batches, and similar rows."""
    if stream is not None:
        if job.workers > 1 and not job.has_global_loss and ModelView(model).has_masked_loss:
            raise InputError(
                "masks reach the loss of this model, so its steps must be weighted by their "
                "unmasked time steps: pass the rows themselves, not a `data` function"
            )
        pipeline = PipelineBatches(stream, collective, job.steps_per_epoch)
        return pipeline, pipeline.sample
    rows = everything = reshape_rows(StoredRows(folder / "train", in_memory), model)
    if job.is_elastic and job.shuffle != "global":
        rows = ShardedRows(everything, job.workers, collective.rank)
    batches = RowBatches(
        everything,
        counts["train"],
        collective.rank,
        job.batch_size,
        seed=job.seed,
        shuffle=job.shuffle,
        limit=job.steps_per_epoch,
        batches=job.batches,
        has_all=job.is_elastic,
    )
    return batches, rows


def build_variables(model: Any, rows: Rows, with_optimizer: bool = True) -> Any:
    """Create all weights and the optimizer's state, so that they can be made equal.

    Returns a description of the inputs.
    """
    check_has_labels(model, rows.spec, "data", trains=True)
    check_input_names(model, rows.spec)
    check_output_names(model, rows.spec)
    inputs = build_by_batch(model, nest(make_zero_row(rows)))
    if with_optimizer and model.compiled and model.optimizer and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return describe_inputs(inputs)


def count_neighbours(collective: Collective) -> int:
    """Count the workers on this worker's machine, including itself."""
    own = np.array([number_machine()], np.float64)
    return sum(bool(other == own) for other in collective.all_gather(own))
