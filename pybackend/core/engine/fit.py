"""Keras's own ``fit``, with the callbacks that synchronize the workers' replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.core.engine.audit import Auditor
from pybackend.core.engine.checkpointing import ResumedCallbacks
from pybackend.core.engine.exchange import GradientExchange
from pybackend.core.engine.feed import Feed
from pybackend.core.engine.lifecycle import Lifecycle, Start
from pybackend.core.engine.overrides import override
from pybackend.core.engine.pipeline_feed import PipelineFeed
from pybackend.core.engine.replica import Replica
from pybackend.core.engine.session_callbacks import StepReports, StopWhenAsked
from pybackend.core.engine.step_clock import StepClock
from pybackend.core.engine.sync import EpochSync, StopTogether
from pybackend.core.engine.synchronizer import make_synchronizer
from pybackend.core.engine.training_state import continue_log
from pybackend.core.job.messages import Answers, Emit, Note, Phase
from pybackend.core.job.worker_options import ScaleLearningRate
from pybackend.core.model.callbacks import count_items, select_callbacks
from pybackend.core.model.view import ModelView, has_own
from pybackend.core.words import either


def fit(
    replica: Replica,
    lifecycle: Lifecycle,
    clock: StepClock,
    tensorboard: Sequence[Any],
    answers: Answers | None,
) -> tuple[dict[str, list[Any]], int, Auditor | None]:
    """Train a replica with Keras's own ``fit``, synchronized with the other workers.

    Parameters
    ----------
    clock
        Times the steps.
    tensorboard
        Additional callbacks, whose state is not saved.
    answers
        Messages from observers of the training run.

    Returns
    -------
    tuple
        The history, as a mapping from metrics to values; the number of steps taken; and the auditor
        or None.
    """
    # Restoring a checkpoint may have called the model.
    replica = replace(replica, view=replica.view.renewed())
    model, job, feed = replica.model, replica.job, replica.feed
    # The feed shuffles, not Keras.
    options: dict[str, Any] = {"epochs": job.epochs, "verbose": 0, "shuffle": False}
    options |= feed.fit_options
    if job.class_weight is not None and isinstance(feed, Feed):
        options["class_weight"] = feed.complete_class_weight(
            {int(code): weight for code, weight in job.class_weight}
        )
    lifecycle.share_state(replica)
    if replica.collective.world_size > 1:
        _report_what_is_local(replica.view, replica.emit)
    synchronizer = make_synchronizer(replica, clock)
    sync = EpochSync(replica, synchronizer)
    own = select_callbacks(replica.rank, replica.callbacks)
    sync.evaluated_by = [*own, *tensorboard]
    scaled = None
    if job.scale_lr is not None:
        scaled = ScaledSteps(job.scale_lr, job.workers, feed, model)
    auditor = None
    if isinstance(synchronizer, GradientExchange) and job.is_audited:
        others = scaled.variables if scaled else ()
        class_weight = options.get("class_weight")
        auditor = Auditor(replica, synchronizer, sync, clock, others, lifecycle.audit, class_weight)
    reports = [StepReports(replica)] if replica.rank == 0 and job.reports_steps else []
    listed: list[Any] = [clock, sync]
    if not own:  # an audit is not part of the step
        listed += reports
    listed += [auditor.ending] if auditor else []
    listed += [*own, *tensorboard, *([scaled] if scaled else [])]
    if own:  # they may add values to the step's logs
        listed += reports
    if replica.rank == 0 and job.is_observed and answers is not None:
        listed.append(StopWhenAsked(answers))
    if replica.collective.world_size > 1:
        listed.append(StopTogether(replica, synchronizer, lifecycle.preemption))
    listed += lifecycle.make_callbacks(replica, sync, synchronizer)
    if auditor is not None:
        listed.append(auditor.beginning)
    if lifecycle.start.state is not None:
        for callback in own:
            continue_log(callback)
    watched = own if replica.rank == 0 else []
    items = count_items(watched)
    replica.emit(Phase("taking the first step"))
    try:
        # The exchange is outside: the step at its end is scaled.
        with (
            scaled.install() if scaled else nullcontext(),
            synchronizer.install(),
            auditor.noise.watch() if auditor else nullcontext(),
        ):
            history = _fit_from(lifecycle.start, model, feed, listed, options)
    except tf.errors.OpError as error:
        raise synchronizer.error or error from None
    if synchronizer.shards is not None:
        synchronizer.shards.restore_whole()
    _report_filled(items, count_items(watched), replica.emit)
    return dict(history), sync.steps_done, auditor


def _fit_from(
    start: Start, model: Any, feed: Feed | PipelineFeed, callbacks: list[Any], options: Any
) -> dict[str, list[Any]]:
    """Train, starting at an epoch and step, as if this process had trained up to that point.

    Returns the history.
    """
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
        # This ends a training run: it would replace the weights by their averages.
        with override(model.optimizer, "finalize_variable_values", lambda variables: None):
            model.fit(feed.dataset(start.step), callbacks=resumed, initial_epoch=epoch, **once)
        resumed.begin_rest()
        epoch, is_stopped = epoch + 1, bool(model.stop_training)
    first = options["epochs"] if is_stopped else epoch
    fitted = model.fit(feed.dataset(), callbacks=resumed, initial_epoch=first, **options)
    return dict(fitted.history)


def _report_filled(before: Mapping[str, int], after: Mapping[str, int], emit: Emit) -> None:
    """Report what callbacks have filled here, because it stays as it is in the session."""
    filled = [name for name, count in after.items() if count > before.get(name, 0)]
    if filled:
        observer = either("an Observer", "`observer()`")
        text = (
            f"callbacks run on the workers and filled {', '.join(filled)} there; in this session, "
            f"nothing was added. Use the history of the result, or {observer}, which runs here"
        )
        emit(Note(text))


def _report_what_is_local(view: ModelView, emit: Emit) -> None:
    """Report state in a custom train_step that averaging does not cover."""
    if has_own(view.model, "train_step"):
        text = (
            "the model has its own train_step: the gradients it passes to optimizers are averaged "
            "over the workers, and the values it logs are averaged, weighted by rows, but "
            "everything else (such as gradients that it clips itself) is computed from each "
            "worker's own rows"
        )
        emit(Note(text))
    others = sorted(view.other_optimizers)
    if others:
        text = (
            f"the state of {', '.join(others)} stays on the workers: if you train the model again, "
            "these optimizers start from scratch; only the one passed to compile() continues"
        )
        emit(Note(text))


class ScaledSteps(keras.callbacks.Callback):
    """Callback that scales the learning rate by the number of workers, but only during each step.

    Callbacks, checkpoints and the trained model see the unscaled learning rate of the optimizer,
    and callbacks can change it. It is one of the last callbacks, and adds the scaled rate in an
    epoch's last step to the history. `ScaleLearningRate` determines the factor.

    Parameters
    ----------
    feed
        Knows the number of steps in an epoch.
    """

    def __init__(
        self, scale: ScaleLearningRate, workers: int, feed: Feed | PipelineFeed, model: Any
    ) -> None:
        super().__init__()
        self._scale = scale
        self._workers = workers
        self._feed = feed
        self._most = feed.most_steps
        self._optimizer = model.optimizer
        # Several steps may run between two calls of a callback. A custom train_step may call the
        # optimizer several times; each call has the rate of the first.
        self._advances = int(not has_own(model, "train_step"))
        self._multiples = tf.Variable(np.ones(self._most, "float32"), trainable=False)
        self._step = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._rate = tf.Variable(0.0, dtype=self._optimizer.learning_rate.dtype, trainable=False)

    @property
    def variables(self) -> list[Any]:
        """Variables that a step reads and changes."""
        return [self._multiples, self._step, self._rate]

    @contextmanager
    def install(self) -> Iterator[None]:
        """Scale the optimizer's steps while the context is active."""
        with override(self._optimizer, "apply", self._wrap(self._optimizer.apply)):
            yield

    def _wrap(self, apply: Any) -> Any:
        def scaled(*args: Any, **options: Any) -> Any:
            given = self._optimizer.learning_rate
            unscaled = tf.identity(given.value)
            # The last of several steps at once may lie beyond the epoch's end.
            place = tf.minimum(self._step, self._most - 1)
            rate = unscaled * tf.cast(tf.gather(self._multiples, place), unscaled.dtype)
            given.assign(rate)
            applied = apply(*args, **options)
            given.assign(unscaled)
            self._rate.assign(rate)
            self._step.assign_add(self._advances)
            return applied

        return scaled

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        steps = self._feed.steps
        done = [epoch + min(step, steps - 1) / steps for step in range(self._most)]
        multiples = [self._scale.multiple(self._workers, epochs) for epochs in done]
        self._multiples.assign(np.array(multiples, "float32"))

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._step.assign(batch)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if logs is not None:
            logs["learning_rate"] = float(self._rate.numpy())
