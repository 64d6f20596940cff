"""One worker's training, from the files of its job to its report and, on rank 0, the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np

from pybackend.collective import Collective, Mesh
from pybackend.data.arrays import nest
from pybackend.data.rows import DealtRows, Rows, SpooledRows, make_zero_row
from pybackend.engine.board import make_board
from pybackend.engine.elastic import Memory
from pybackend.engine.feed import Feed
from pybackend.engine.fit import fit
from pybackend.engine.global_batch import (
    NOTHING,
    OverBatch,
    check_runs_eagerly,
    find_compiled_metrics,
)
from pybackend.engine.held_out import HeldOut, build_metrics
from pybackend.engine.job_identity import describe_training
from pybackend.engine.metrics import to_plain
from pybackend.engine.pipeline_feed import PipelineFeed
from pybackend.engine.resume import describe_model, open_checkpoints
from pybackend.engine.row_memory import fit_in_memory
from pybackend.engine.save import encode_trained, plan_saving, write_model
from pybackend.engine.step_clock import StepClock
from pybackend.engine.step_means import build_losses
from pybackend.engine.steps import has_keras_train_step
from pybackend.engine.trials import MetricsKind, choose_rows, find_over, try_metrics
from pybackend.errors import InputError
from pybackend.job.answers import Answers
from pybackend.job.checkpoint import pointing_to
from pybackend.job.job import TrainingJob
from pybackend.job.messages import Emit, Note
from pybackend.job.notice import Notice
from pybackend.job.options import Exchange
from pybackend.job.report import Audit, StepTimes
from pybackend.model.callbacks import check_callbacks
from pybackend.model.checks import check_model
from pybackend.model.compare import hash_weights
from pybackend.model.inputs import (
    build_by_batch,
    check_input_names,
    check_output_names,
    reshape_rows,
)
from pybackend.model.labels import check_has_labels, check_some_labels
from pybackend.model.layers import find_synchronized
from pybackend.model.load import load_job_model
from pybackend.model.masks import has_masked_loss
from pybackend.model.transfer import describe_inputs

_ABOUT_METRICS = (
    "some of the metrics are not sums over rows: in each step the workers send each other their "
    "outputs, and compute the metrics of all rows"
)
_ABOUT_UNTRIED_METRICS = (
    "the metrics failed when they were tried on some rows: their variables are summed over the "
    "workers, which is right for sums and counts only"
)
_ABOUT_UNEVEN = (
    "the arrays of a batch have different numbers of rows: gradients are weighted by the rows of "
    "`y`, which is exact if the loss is a mean over these; no step is audited"
)
_ABOUT_PIPELINES = (
    "a training that resumes calls the function `data` anew: its result is that of one without an "
    "interruption if the function gives the same batches in every epoch"
)


@dataclass(frozen=True)
class Training:
    """What a worker's training gave; attributes as in `WorkerReport`.

    ``discard`` removes what is of no use once the report is there.
    """

    history: dict[str, list[Any]]
    rows: int
    steps: int
    seconds: float
    weights_sha256: str
    model_sha256: str | None
    inputs: Any
    waited: float | None
    step_times: StepTimes | None = None
    audit: Audit | None = None
    discard: Callable[[], None] | None = None


def train(
    job: TrainingJob,
    collective: Collective,
    counts: Mapping[str, list[int]],
    folder: Path,
    emit: Emit,
    stream: Any = None,
    memory: Memory | None = None,
    epoch: int | None = None,
    answers: Answers | None = None,
) -> Training:
    """Train this worker's replica with the others.

    Parameters
    ----------
    counts
        Rows of every worker, by rank, of the data sets in the folder.
    folder
        The worker's own: ``train/``, ``validation/`` and ``model.keras`` or ``model.pkl`` go in,
        ``trained.h5`` or ``trained.keras`` comes out on rank 0.
    emit
        Called with an event per epoch.
    stream
        The ``tf.data.Dataset`` to train on in place of rows in the folder.
    memory
        Of an elastic training, whose worker holds the rows of all; ``counts`` are this gang's.
    epoch
        Back to whose beginning that goes; None: it begins.
    answers
        What observers of the training say to it.
    """
    rank = collective.rank
    loaded = load_job_model(job, folder) if memory is None else memory.loaded
    model = loaded.model
    spools = [folder / name for name in counts if (folder / name).is_dir()]
    in_memory = job.in_memory and fit_in_memory(spools, job.resources.bytes, collective, emit)
    feed, rows = _make_feed(job, collective, counts, folder, model, stream, in_memory)
    if isinstance(feed, PipelineFeed) and feed.is_uneven and job.workers > 1:
        emit(Note(_ABOUT_UNEVEN))
    callbacks = list(loaded.extras.get("callbacks") or [])
    check_callbacks(callbacks)
    inputs = build_variables(model, rows)
    check_model(model, job)
    tried = choose_rows(model, rows, job)
    if tried is not None:
        check_some_labels(model, tried)
    metrics = try_metrics(model, tried, job, collective)
    over = OverBatch(loss=job.has_global_loss, metrics=metrics == "not sums")
    if job.workers > 1 and isinstance(job.exchange, Exchange):
        _report_metrics(model, metrics, emit)
        needs_rows = over != NOTHING or not has_keras_train_step(model)
        if needs_rows or find_synchronized(model):
            check_runs_eagerly(model, feed.may_be_empty)
    # What is random from here on differs from rank to rank.
    if memory is None or not memory.is_seeded:
        own = rank if memory is None else memory.member
        keras.utils.set_random_seed((job.seed + own) % 2**32)
    plan = plan_saving(loaded, inputs, job, emit) if rank == 0 else None
    if job.workers > 1:
        build_losses(model, rows)
    if model.run_eagerly and feed.may_be_empty:
        build_metrics(model, rows)
    held_out, others = None, None
    if "validation" in counts:
        others = reshape_rows(SpooledRows(folder / "validation", in_memory), model)
        if job.is_elastic:
            others = DealtRows(others, job.workers, rank)
        check_has_labels(model, others.spec, "validation_data", trains=False)
        evaluated = find_over(model, tried, metrics, job, collective, emit)
        evaluated = OverBatch(over.loss or evaluated.loss, evaluated.metrics)
        held_out = HeldOut(others, counts["validation"], job.batch_size, evaluated)
        held_out.prepare(model, collective)
    checkpoints = None
    if job.checkpoint is not None:
        sets = {"train": rows if stream is None else None, "validation": others}
        description = describe_training(job, model, callbacks, sets, collective)
        kept = None if plan is None else describe_model(job, model, plan, inputs, description)
        checkpoints = open_checkpoints(
            job, collective, kept, lambda: encode_trained(loaded, plan) if plan else b"", emit
        )
        _check_can_be_kept(feed, emit)
        start = checkpoints.start
        if start.state is not None:
            feed.resume(job.initial_epoch)
        is_resumed = start.state is not None and has_keras_train_step(model)
        if is_resumed or start.is_within_epoch or model.jit_compile:
            # They have values to be restored. XLA fuses a step otherwise that makes them first.
            build_metrics(model, rows)
            model.make_test_function(force=True)
    first = None if memory is None else memory.go_back(epoch, collective, job)
    if first is not None:
        if first.state is not None:
            feed.resume(job.initial_epoch)
        if has_keras_train_step(model):  # as above: they are kept before the first step, too
            build_metrics(model, rows)
            model.make_test_function(force=True)
    began, waited = time.monotonic(), collective.waited
    notice = Notice() if memory is None else memory.notice
    clock = StepClock(feed.arrivals)
    if checkpoints is not None or memory is not None:
        notice.expect()  # to the end: what comes after it is kept by then, and handed over
    history, steps, auditor = fit(
        model,
        collective,
        feed,
        held_out=held_out,
        callbacks=callbacks,
        job=job,
        emit=emit,
        clock=clock,
        metrics=metrics,
        checkpoints=checkpoints,
        notice=notice,
        memory=memory,
        start=first,
        board=make_board(job, folder, emit) if rank == 0 else (),
        answers=answers,
    )
    seconds, waited = time.monotonic() - began, collective.waited - waited
    waited -= auditor.waited if auditor else 0.0
    audit = auditor.report if auditor else None
    if memory is not None and memory.audit.steps:  # its last gang may be of one worker
        audit = memory.audit
    is_timed = not job.needs_tensorflow_server
    step_times = clock.agree(collective, _read_costs(collective)) if is_timed else None
    weights = hash_weights(model)
    if job.model_uri is not None and not _is_same_everywhere(collective, weights):
        plan = None  # the driver will say so, and keep what is there
    digest = None
    if checkpoints is not None:
        checkpoints.wait(job.timeout)
    if plan is not None:
        with pointing_to(job.checkpoint):
            digest = write_model(loaded, plan, folder, job.model_uri, emit)
    discard = None
    if memory is not None or job.discards_checkpoints:
        # Until the model is written, rank 0 may be lost, and the others go on without it.
        collective.all_gather(np.zeros(1, np.int8))
    if checkpoints is not None and job.discards_checkpoints:
        discard = partial(checkpoints.clear, job.timeout)
    return Training(
        history={name: [to_plain(v) for v in values] for name, values in history.items()},
        rows=feed.rows,
        steps=steps,
        seconds=seconds,
        weights_sha256=weights,
        model_sha256=digest,
        inputs=inputs,
        waited=waited if is_timed else None,
        step_times=step_times,
        audit=audit if audit and rank == 0 else None,
        discard=discard,
    )


def _read_costs(collective: Collective) -> tuple[float, float, float] | None:
    if not isinstance(collective, Mesh):
        return None
    costs = collective.cost_model
    return costs.latency_seconds, costs.seconds_per_byte, costs.add_seconds_per_byte


def _report_metrics(model: Any, metrics: MetricsKind, emit: Emit) -> None:
    if metrics == "not sums":
        emit(Note(_ABOUT_METRICS))
    elif metrics == "unknown" and find_compiled_metrics(model):
        emit(Note(_ABOUT_UNTRIED_METRICS))


def _check_can_be_kept(feed: Feed | PipelineFeed, emit: Emit) -> None:
    """Say on what a pipeline's result depends; `InputError` if the data would be others."""
    if isinstance(feed, PipelineFeed):
        if feed.fit_options:
            raise InputError(
                "`checkpoint` needs a function `data` whose batches end with each epoch: endless "
                "ones cannot be found again. Leave out `steps_per_epoch`, or pass rows or files"
            )
        emit(Note(_ABOUT_PIPELINES))


def _is_same_everywhere(collective: Collective, digest: str) -> bool:
    own = np.frombuffer(digest.encode(), np.uint8).copy()
    return len({part.tobytes() for part in collective.all_gather(own)}) == 1


def _make_feed(
    job: TrainingJob,
    collective: Collective,
    counts: Mapping[str, list[int]],
    folder: Path,
    model: Any,
    stream: Any,
    in_memory: bool,
) -> tuple[Feed | PipelineFeed, Rows]:
    """The local batches, and rows like theirs."""
    if stream is not None:
        if job.workers > 1 and not job.has_global_loss and has_masked_loss(model):
            raise InputError(
                "masks reach the loss of this model, so that its steps must be weighted by what "
                "they hold: pass the rows themselves, not a function `data`"
            )
        pipeline_feed = PipelineFeed(stream, collective, job.steps_per_epoch)
        return pipeline_feed, pipeline_feed.sample
    rows = reshape_rows(SpooledRows(folder / "train", in_memory), model)
    if job.is_elastic and job.shuffle != "global":
        rows = DealtRows(rows, job.workers, collective.rank)
    feed = Feed(
        rows,
        counts["train"],
        collective.rank,
        job.batch_size,
        seed=job.seed,
        shuffle=job.shuffle,
        limit=job.steps_per_epoch,
        batches=job.batches,
    )
    return feed, rows


def build_variables(model: Any, rows: Rows) -> Any:
    """Create all weights and the optimizer's state, so that they can be made equal.

    Returns what describes the inputs.
    """
    check_has_labels(model, rows.spec, "data", trains=True)
    check_input_names(model, rows.spec)
    check_output_names(model, rows.spec)
    inputs = build_by_batch(model, nest(make_zero_row(rows)))
    if model.compiled and model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)
    return describe_inputs(inputs)
