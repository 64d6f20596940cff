"""Keras's own ``fit``, with what keeps the workers' replicas in step."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import keras
import tensorflow as tf

from pybackend.collective import Collective
from pybackend.engine.audit import Auditor
from pybackend.engine.checkpointing import Checkpointing, Checkpoints, ResumedCallbacks, Start
from pybackend.engine.csv_log import continue_log
from pybackend.engine.elastic import EpochKeeper, Memory
from pybackend.engine.exchange import GradientExchange
from pybackend.engine.feed import Feed
from pybackend.engine.held_out import HeldOut
from pybackend.engine.learning_rate import ScaledSteps
from pybackend.engine.leaving import Leaving
from pybackend.engine.observed import StepReports, StopWhenAsked
from pybackend.engine.overrides import override
from pybackend.engine.pipeline_feed import PipelineFeed
from pybackend.engine.state import (
    broadcast_state,
    check_structure,
    find_differing_weights,
    offset_seeds,
)
from pybackend.engine.step_clock import StepClock
from pybackend.engine.steps import has_keras_train_step
from pybackend.engine.sync import EpochSync, StopTogether
from pybackend.engine.synchronizer import make_synchronizer
from pybackend.engine.training_state import TrainingState
from pybackend.engine.trials import MetricsKind
from pybackend.job.answers import Answers
from pybackend.job.job import Job
from pybackend.job.messages import Emit, Note
from pybackend.job.notice import Notice
from pybackend.model.callbacks import select_callbacks
from pybackend.model.layers import find_other_optimizers


def fit(
    model: Any,
    collective: Collective,
    feed: Feed | PipelineFeed,
    held_out: HeldOut | None,
    callbacks: list[Any],
    job: Job,
    emit: Emit,
    clock: StepClock,
    metrics: MetricsKind = "unknown",
    checkpoints: Checkpoints | None = None,
    notice: Notice | None = None,
    memory: Memory | None = None,
    start: Start | None = None,
    board: Sequence[Any] = (),
    answers: Answers | None = None,
) -> tuple[dict[str, list[Any]], int, Auditor | None]:
    """Train a model by its own ``fit``, kept in step with the other workers.

    Parameters
    ----------
    clock
        Times the steps.
    metrics
        Whether the metrics given to ``compile`` may be summed.
    checkpoints
        Where the training begins, and where it is kept.
    notice
        Tells when this process is to end: all leave then, after a last checkpoint.
    memory
        What the worker of an elastic training remembers.
    start
        Where the training begins, if not where its checkpoint is.
    board
        Further callbacks, of which no state is kept.
    answers
        What observers of the training say to it.

    Returns
    -------
    tuple
        The history, values by name of the figure; the number of steps taken; and who has audited
        them, or None.
    """
    # The feed shuffles; Keras is not asked to.
    options: dict[str, Any] = {"epochs": job.epochs, "verbose": 0, "shuffle": False}
    options |= feed.fit_options
    if job.class_weight is not None and isinstance(feed, Feed):
        options["class_weight"] = feed.complete_class_weight(
            {int(code): weight for code, weight in job.class_weight}
        )
    start = start or (checkpoints.start if checkpoints else Start(job.initial_epoch))
    if memory is not None and not memory.is_seeded:
        offset_seeds(model, memory.member)
        memory.is_seeded = True
    if collective.world_size > 1 and (memory is None or start.state is None):
        _share_state(model, collective, emit, has_seeds=memory is not None)
    if collective.world_size > 1:
        _report_what_is_local(model, emit)
    synchronizer = make_synchronizer(model, collective, feed, job, emit, clock, metrics)
    sync = EpochSync(job, collective, synchronizer, feed, held_out, emit, metrics)
    own = select_callbacks(collective.rank, callbacks)
    sync.evaluated_by = [*own, *board]
    scaled = None
    if job.scale_lr is not None:
        scaled = ScaledSteps(job.scale_lr, job.workers, feed.steps, model)
    auditor = None
    if isinstance(synchronizer, GradientExchange) and job.is_audited:
        others = scaled.variables if scaled else ()
        auditor = Auditor(
            model,
            collective,
            feed,
            synchronizer,
            job,
            emit,
            others,
            None if memory is None else memory.audit,
            options.get("class_weight"),
            clock,
        )
    listed = [clock, sync, *([auditor.ending] if auditor else []), *own, *board]
    listed += [scaled] if scaled else []
    if collective.rank == 0 and job.reports_steps:
        listed.append(StepReports(job, feed, collective.world_size, emit))
    if collective.rank == 0 and job.is_observed and answers is not None:
        listed.append(StopWhenAsked(answers))
    leaving = None
    if checkpoints is not None:
        # Within an epoch, the place in a pipeline could not be found again.
        leaving = Leaving(collective, notice or Notice(), isinstance(feed, Feed))
    if collective.world_size > 1:
        listed.append(StopTogether(collective, synchronizer, emit, leaving, callbacks))
    keeper = None
    if checkpoints is not None and leaving is not None:
        history = keras.callbacks.History()
        kept = {-1: history, **{n: c if c in own else None for n, c in enumerate(callbacks)}}
        state = TrainingState(model, sync, synchronizer, kept)
        keeper = Checkpointing(job, collective, checkpoints, state, feed.steps, emit, leaving)
        listed += [history, keeper]
    if memory is not None:
        history = keras.callbacks.History()
        kept = {-1: history, **{n: c if c in own else None for n, c in enumerate(callbacks)}}
        state = TrainingState(model, sync, synchronizer, kept, memory.first)
        listed += [history, EpochKeeper(job, collective, memory, start, state, emit)]
    if auditor is not None:
        listed.append(auditor.beginning)
    if start.state is not None:
        for callback in own:
            continue_log(callback)
    try:
        # The exchange is outside: what is scaled is the step that it ends with.
        with (
            scaled.install() if scaled else nullcontext(),
            synchronizer.install(),
            auditor.noise.watch() if auditor else nullcontext(),
        ):
            history = _fit_from(start, model, feed, listed, options)
    except tf.errors.OpError as error:
        raise synchronizer.error or error from None
    if keeper is not None:
        keeper.finish()
    return dict(history), sync.steps_done, auditor


def _fit_from(
    start: Start, model: Any, feed: Feed | PipelineFeed, callbacks: list[Any], options: Any
) -> dict[str, list[Any]]:
    """Train from some place on, as if all before had been done here; returns the history."""
    if start.state is None:
        fitted = model.fit(
            feed.dataset(), callbacks=callbacks, initial_epoch=start.epoch, **options
        )
        return dict(fitted.history)
    params = {"verbose": 0, "epochs": options["epochs"], "steps": feed.steps, "model": model}
    resumed = ResumedCallbacks(callbacks, start.step, **params)
    epoch, is_stopped = start.epoch, start.is_stopped
    if start.is_within_epoch:
        once = {**options, "epochs": epoch + 1}
        # It ends a training: it would take averages of the weights for them.
        with override(model.optimizer, "finalize_variable_values", lambda variables: None):
            model.fit(feed.dataset(start.step), callbacks=resumed, initial_epoch=epoch, **once)
        resumed.begin_rest()
        epoch, is_stopped = epoch + 1, bool(model.stop_training)
    first = options["epochs"] if is_stopped else epoch
    fitted = model.fit(feed.dataset(), callbacks=resumed, initial_epoch=first, **options)
    return dict(fitted.history)


def _report_what_is_local(model: Any, emit: Emit) -> None:
    """Say what averaging cannot reach in a train_step of the user's."""
    if not has_keras_train_step(model):
        text = (
            "the model has its own train_step: the gradients it gives to optimizers are averaged "
            "over the workers, and what it logs is averaged by rows, but what else it computes "
            "(such as gradients it clips by itself) is of each worker's own rows"
        )
        emit(Note(text))
    others = sorted(find_other_optimizers(model))
    if others:
        text = (
            f"the state of {', '.join(others)} stays on the workers: a training that is continued "
            "begins with new optimizers, except for the one given to compile()"
        )
        emit(Note(text))


def _share_state(model: Any, collective: Collective, emit: Emit, has_seeds: bool) -> None:
    """Give all ranks rank 0's weights, and report if they were not equal before."""
    check_structure(model, collective)
    differing = find_differing_weights(model, collective)
    if differing:
        text = (
            f"the first weights of worker {', '.join(map(str, differing))} differed from those of "
            "worker 0 (seeded by rank?): all start from worker 0's"
        )
        emit(Note(text))
    if not has_seeds:
        offset_seeds(model, collective.rank)
    broadcast_state(model, collective)
