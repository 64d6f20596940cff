"""Train one worker with Keras's own ``fit``, from the files of its job to its report and model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import tensorflow as tf

from pybackend.core.collective import Collective, Mesh, all_gather_values
from pybackend.core.engine import session_callbacks
from pybackend.core.engine.audit.auditor import Auditor
from pybackend.core.engine.checkpoint.training_state import TrainingStart, continue_log
from pybackend.core.engine.exchange.gradient_exchange import GradientExchange
from pybackend.core.engine.lifecycle import CheckpointedLifecycle, Lifecycle
from pybackend.core.engine.replica import Replica, make_replica
from pybackend.core.engine.row_batches import Batches, RowBatches
from pybackend.core.engine.save import write_model
from pybackend.core.engine.statistics.metrics import to_plain
from pybackend.core.engine.step_changes import override
from pybackend.core.engine.step_clock import StepClock
from pybackend.core.engine.sync import EpochSync, StopTogether, make_synchronizer
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Answers, Emit, Note, Phase
from pybackend.core.job.report import Audit, StepTimes
from pybackend.core.job.storage_options import pointing_to
from pybackend.core.job.worker_options import Exchange
from pybackend.core.model.callbacks import count_items, select_callbacks
from pybackend.core.model.compare import hash_weights
from pybackend.core.model.transfer import LoadedModel, load_job_model
from pybackend.core.model.view import ModelView, has_own
from pybackend.core.words import either, setting

CALLBACK_ORDER = (
    ("clock", "the time that other callbacks take is not part of a step"),
    ("sync", "all that follow get the metrics over the rows of all workers"),
    ("plain reports", "without callbacks of the user; the audit's time is not part of the step"),
    ("audit ends", "it repeats the step, so it must precede all that change the model after it"),
    (
        "own",
        "the user's callbacks may change the model, add values to the logs, and request a stop",
    ),
    ("tensorboard", "it writes the values that the user's callbacks added"),
    ("scaled", "the user's callbacks set the rate that the next step scales, and it adds its own"),
    ("reports", "the user's callbacks may have added values to the step's logs"),
    ("observers", "they request a stop as the user's callbacks do"),
    ("stop", "now all requests are known: all workers stop after the same step, or none"),
    ("lifecycle", "a checkpoint has all that callbacks changed; to resume, it overwrites this"),
    ("audit begins", "it notes the state before a step, after all that could change it"),
)
"""Order of the callbacks in each worker, and why each is where it is. Other orders hang or lie: a
rank that stops alone misses the exchange that the others wait for, and a checkpoint that is written
before the last callback resumes from another model."""


def order_callbacks(callbacks: Mapping[str, Sequence[Any]]) -> list[Any]:
    """Return callbacks, by their name in `CALLBACK_ORDER`, in this order."""
    listed = [(name, one) for name, _ in CALLBACK_ORDER for one in callbacks.get(name, ())]
    check_order([name for name, _ in listed])
    assert len(listed) == sum(map(len, callbacks.values())), f"unknown callbacks in {[*callbacks]}"
    return [one for _, one in listed]


def check_order(names: Sequence[str]) -> None:
    """Raise `AssertionError` if callbacks of these names are not in the order of the table."""
    order = [name for name, _ in CALLBACK_ORDER]
    assert list(names) == sorted(names, key=order.index), f"{[*names]} is not the order {order}"


@dataclass(frozen=True)
class Training:
    """Result of one worker's training; attributes as in `WorkerReport`.

    ``discard`` removes files that are not needed after the report.
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
    by_worker: tuple[int, ...] = ()


def train(
    job: TrainingJob,
    collective: Collective,
    counts: Mapping[str, list[int]],
    folder: Path,
    emit: Emit,
    stream: Any = None,
    lifecycle: Lifecycle | None = None,
    answers: Answers | None = None,
    sent: dict[str, Any] | None = None,
    loaded: LoadedModel | None = None,
) -> Training:
    """Train this worker's replica with the others.

    ``counts`` has the number of rows of every worker, by rank, for each data set in the worker's
    own ``folder``, which has ``train/``, ``validation/`` and the files of the model; rank 0 writes
    ``trained.h5`` or ``trained.keras`` into it. ``stream`` is a ``tf.data.Dataset`` to train on
    instead of these rows. Without a ``lifecycle``, the job's checkpoint options specify it.
    ``answers`` are messages from observers; ``sent`` is as in `load_job_model`; ``loaded`` is the
    model in the state after the last generation (None: as the driver sent it).
    """
    if lifecycle is None:
        lifecycle = Lifecycle(job) if job.checkpoint is None else CheckpointedLifecycle(job)
    emit(Phase("loading the model"))
    loaded = loaded or load_job_model(job, folder, sent)
    replica = make_replica(job, collective, counts, folder, emit, loaded, stream, lifecycle.seed)
    lifecycle.begin(replica)
    tensorboard: list[Any] = []
    if replica.rank == 0:
        tensorboard = session_callbacks.make_tensorboard(job, folder, emit)
    began, waited = time.monotonic(), collective.waited
    clock = StepClock(replica.batches.arrivals)
    why = _explain_no_audit(job, collective)
    if why is not None and why not in lifecycle.audit.skipped:
        lifecycle.audit.skipped.append(why)  # earlier groups or runs may have been audited
    history, steps, auditor = fit(replica, lifecycle, clock, tensorboard, answers)
    seconds, waited = time.monotonic() - began, collective.waited - waited
    waited -= auditor.waited if auditor else 0.0
    is_timed = not job.needs_tensorflow_server
    costs = collective.cost_model if isinstance(collective, Mesh) else None
    step_times = clock.agree(collective, costs) if is_timed else None
    if step_times is not None and isinstance(collective, Mesh):
        step_times = replace(step_times, route=collective.route)
    weights = hash_weights(replica.model)
    digest = _write_model(replica, lifecycle, folder, weights)
    return Training(
        history={name: [to_plain(v) for v in values] for name, values in history.items()},
        rows=replica.batches.rows,
        steps=steps,
        seconds=seconds,
        weights_sha256=weights,
        model_sha256=digest,
        inputs=replica.inputs,
        waited=waited if is_timed else None,
        step_times=step_times,
        audit=lifecycle.audit if replica.rank == 0 else None,
        discard=lifecycle.close(replica),
    )


def _explain_no_audit(job: TrainingJob, collective: Collective) -> str | None:
    """Return why no step of a training is compared with one process; None: steps are."""
    if not isinstance(job.exchange, Exchange):
        return "with `LocalSteps`, workers take steps of their own"
    if not job.is_audited:
        return f"`{setting(audit=False)}`"
    return "one worker is one process" if collective.world_size == 1 else None


def _write_model(replica: Replica, lifecycle: Lifecycle, folder: Path, weights: str) -> str | None:
    """Write the trained model on rank 0; return the file's digest."""
    job, plan, collective = replica.job, replica.plan, replica.collective
    is_same = job.model_uri is None or len({*all_gather_values(collective, weights)}) == 1
    lifecycle.finish()
    # If the weights differ, the driver will report it, and an existing file stays unchanged.
    if plan is None or not is_same:
        return None
    with pointing_to(job.checkpoint):
        return write_model(replica.loaded, plan, folder, job.model_uri, replica.emit)


def fit(
    replica: Replica,
    lifecycle: Lifecycle,
    clock: StepClock,
    tensorboard: Sequence[Any],
    answers: Answers | None,
) -> tuple[dict[str, list[Any]], int, Auditor | None]:
    """Train a replica with Keras's own ``fit``, synchronized with the other workers.

    The state of ``tensorboard``'s callbacks is not saved. Returns the history, as a mapping from
    metrics to values; the number of steps taken; and the auditor or None.
    """
    # Restoring a checkpoint may have called the model.
    replica = replace(replica, view=replica.view.renewed())
    job = replica.job
    options = _make_options(job, replica.batches)
    lifecycle.share_state(replica)
    is_alone = replica.collective.world_size == 1
    if not is_alone:
        _report_what_is_local(replica.view, replica.emit)
    synchronizer = make_synchronizer(replica, clock)
    sync = EpochSync(replica, synchronizer)
    own = select_callbacks(replica.rank, replica.callbacks)
    sync.evaluated_by = [*own, *tensorboard]
    scaled = session_callbacks.ScaledSteps(replica) if job.scale_lr is not None else None
    auditor = None
    if isinstance(synchronizer, GradientExchange) and job.is_audited:
        others = scaled.variables if scaled else ()
        weights = options.get("class_weight")
        auditor = Auditor(replica, synchronizer, sync, clock, others, lifecycle.audit, weights)
    reports, observers = session_callbacks.make_for_session(replica, answers)
    callbacks = order_callbacks(
        {
            "clock": [clock],
            "sync": [sync],
            "plain reports": [] if own else reports,
            "audit ends": [auditor.ending] if auditor else [],
            "own": own,
            "tensorboard": tensorboard,
            "scaled": [scaled] if scaled else [],
            "reports": reports if own else [],
            "observers": observers,
            "stop": [] if is_alone else [StopTogether(replica, synchronizer, lifecycle.preemption)],
            "lifecycle": lifecycle.make_callbacks(replica, sync, synchronizer),
            "audit begins": [auditor.beginning] if auditor else [],
        }
    )
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
            history = _fit_from(lifecycle.start, replica, callbacks, options)
    except tf.errors.OpError as error:
        raise synchronizer.error or error from None
    if synchronizer.shards is not None:
        synchronizer.shards.restore_whole()
    _report_filled(items, count_items(watched), replica.emit)
    return history, sync.steps_done, auditor


def _make_options(job: TrainingJob, batches: Batches) -> dict[str, Any]:
    # The batches are in order already: Keras must not shuffle them.
    options: dict[str, Any] = {"epochs": job.epochs, "verbose": 0, "shuffle": False}
    options |= batches.fit_options
    if job.class_weight is not None and isinstance(batches, RowBatches):
        options["class_weight"] = batches.complete_class_weight(
            {int(code): weight for code, weight in job.class_weight}
        )
    return options


def _fit_from(
    start: TrainingStart, replica: Replica, callbacks: list[Any], options: Any
) -> dict[str, list[Any]]:
    """Train, starting at an epoch and step, as if this process had trained up to that point."""
    model, batches, epoch = replica.model, replica.batches, start.epoch
    if start.state is None:
        fitted = model.fit(batches.dataset(), callbacks=callbacks, initial_epoch=epoch, **options)
        return dict(fitted.history)
    for callback in callbacks:
        continue_log(callback)
    params = {"verbose": 0, "epochs": options["epochs"], "steps": batches.steps, "model": model}
    resumed = session_callbacks.ResumedCallbacks(callbacks, start.step, **params)
    is_stopped = start.is_stopped
    if start.is_within_epoch:
        once = {**options, "epochs": epoch + 1}
        # This ends a training run: it would replace the weights by their averages.
        with override(model.optimizer, "finalize_variable_values", lambda variables: None):
            model.fit(batches.dataset(start.step), callbacks=resumed, initial_epoch=epoch, **once)
        resumed.begin_rest()
        epoch, is_stopped = epoch + 1, bool(model.stop_training)
    first = options["epochs"] if is_stopped else epoch
    fitted = model.fit(batches.dataset(), callbacks=resumed, initial_epoch=first, **options)
    return dict(fitted.history)


def _report_filled(before: Mapping[str, int], after: Mapping[str, int], emit: Emit) -> None:
    """Report what callbacks have filled here, because it stays as it is in the session."""
    if filled := [name for name, count in after.items() if count > before.get(name, 0)]:
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
    if others := sorted(view.other_optimizers):
        text = (
            f"the state of {', '.join(others)} stays on the workers: if you train the model again, "
            "these optimizers start from scratch; only the one passed to compile() continues"
        )
        emit(Note(text))
