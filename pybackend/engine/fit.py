"""Keras's own ``fit``, with what keeps the workers' replicas in step."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from pybackend.collective import Collective
from pybackend.engine.backup import ShareRestoredState, find_epoch_to_resume
from pybackend.engine.feed import Feed
from pybackend.engine.held_out import HeldOut
from pybackend.engine.pipeline_feed import PipelineFeed
from pybackend.engine.state import broadcast_state, find_differing_weights, offset_seeds
from pybackend.engine.steps import has_keras_train_step
from pybackend.engine.sync import EpochSync, StopTogether
from pybackend.engine.synchronizer import make_synchronizer
from pybackend.engine.trials import MetricsKind
from pybackend.job.job import Job
from pybackend.job.messages import Emit, Note
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
    metrics: MetricsKind = "unknown",
) -> tuple[dict[str, list[Any]], int, int]:
    """Train a model by its own ``fit``, kept in step with the other workers.

    Parameters
    ----------
    metrics
        Whether the metrics given to ``compile`` may be summed.

    Returns
    -------
    tuple
        The history, values by name of the figure; the number of steps taken; and the index of the
        first epoch.
    """
    # The feed shuffles; Keras is not asked to.
    options: dict[str, Any] = {"epochs": job.epochs, "verbose": 0, "shuffle": False}
    options |= {"initial_epoch": job.initial_epoch, **feed.fit_options}
    if job.class_weight is not None and isinstance(feed, Feed):
        options["class_weight"] = feed.complete_class_weight(dict(job.class_weight))
    if collective.world_size > 1:
        _share_state(model, collective, emit)
    if collective.world_size > 1:
        _report_what_is_local(model, emit)
    synchronizer = make_synchronizer(model, collective, feed, job, emit, metrics)
    sync = EpochSync(job, collective, synchronizer, feed, held_out, emit, metrics)
    if collective.world_size > 1:
        own = select_callbacks(collective.rank, callbacks)
        if any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks):
            # As in Keras, a backup knows better where to begin.
            options["initial_epoch"] = (
                find_epoch_to_resume(callbacks, collective) or job.initial_epoch
            )
            own.append(ShareRestoredState(collective))
        callbacks = [*own, StopTogether(collective, synchronizer)]
    sync.evaluated_by = [one for one in callbacks if not isinstance(one, StopTogether)]
    try:
        with synchronizer.install():
            fitted = model.fit(feed.dataset(), callbacks=[sync, *callbacks], **options)
    except tf.errors.OpError as error:
        raise synchronizer.error or error from None
    return dict(fitted.history), sync.steps_done, options["initial_epoch"]


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


def _share_state(model: Any, collective: Collective, emit: Emit) -> None:
    """Give all ranks rank 0's weights, and report if they were not equal before."""
    differing = find_differing_weights(model, collective)
    if differing:
        text = (
            f"the first weights of worker {', '.join(map(str, differing))} differed from those of "
            "worker 0 (seeded by rank?): all start from worker 0's"
        )
        emit(Note(text))
    offset_seeds(model, collective.rank)
    broadcast_state(model, collective)
