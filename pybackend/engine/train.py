"""One worker's training, from the files of its job to its report and, on rank 0, the model."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.collective import Collective
from pybackend.collective.tensorflow import GraphReduce
from pybackend.data.arrays import nest
from pybackend.data.rows import Rows, SpooledRows, make_zero_row
from pybackend.engine.backup import ShareRestored, epoch_to_resume
from pybackend.engine.evaluate import HeldOut, build_metrics
from pybackend.engine.exchange import GradientExchange, Wire
from pybackend.engine.feed import Feed
from pybackend.engine.graph import GraphExchange
from pybackend.engine.local_steps import LocalSteps
from pybackend.engine.metrics import plain
from pybackend.engine.save import loadable, write_model
from pybackend.engine.sources import Sources
from pybackend.engine.steps import Position, is_plain
from pybackend.engine.stream import StreamFeed
from pybackend.engine.sync import (
    EpochSync,
    StopTogether,
    Uncoupled,
    broadcast_state,
    ranks_that_differ,
    separate_randomness,
    weights_digest,
)
from pybackend.errors import InputError
from pybackend.job import options
from pybackend.job.job import Job
from pybackend.job.messages import Emit, Note, Order
from pybackend.model.callbacks import check_callbacks, select_callbacks
from pybackend.model.checks import check_model
from pybackend.model.inputs import reshape_rows
from pybackend.model.load import load_job_model
from pybackend.model.losses import check_loss_is_mean
from pybackend.model.masks import has_masked_loss


@dataclass(frozen=True)
class Trained:
    """What a worker's training gave: history, figures of the run, digest of the weights."""

    history: dict[str, list[Any]]
    rows: int
    steps: int
    seconds: float
    weights_sha256: str
    model_sha256: str | None


def train(
    job: Job,
    collective: Collective,
    order: Order,
    folder: Path,
    emit: Emit,
    sources: Sources,
) -> Trained:
    """Train this worker's replica with the others.

    Parameters
    ----------
    order
        What the launcher has sent: ``counts`` are the rows of every worker, by rank, of the data
        sets in the folder.
    folder
        The worker's own: ``train/``, ``validation/`` (or how to read them), and ``model.keras`` or
        ``model.pkl`` go in,
        ``trained.h5`` or ``trained.keras`` comes out on rank 0.
    emit
        Called with an event per epoch.
    sources
        What this worker has read for itself.
    """
    rank = collective.rank
    loaded = load_job_model(job, folder)
    model = loaded.model
    counts = {**order.counts, **sources.settled(job, collective, folder)}
    feed, columns = _feed(job, collective, counts, folder, model, sources.stream)
    callbacks = list(loaded.extras.get("callbacks") or [])
    check_callbacks(callbacks)
    _build(model, columns)
    # What is random from here on differs from rank to rank.
    keras.utils.set_random_seed((job.seed + rank) % 2**32)
    check_model(model, job)
    _check_loss(model, columns, job)
    saving = loadable(loaded, job, emit) if rank == 0 else None
    held_out = None
    if model.run_eagerly and feed.may_be_empty:
        build_metrics(model, columns)
    if "validation" in counts:
        rows = reshape_rows(SpooledRows(folder / "validation", job.in_memory), model)
        held_out = HeldOut(rows, counts["validation"], job.batch_size)
    began = time.monotonic()
    history, steps = _fit(model, collective, feed, held_out, callbacks, job, emit)
    seconds = time.monotonic() - began
    weights = weights_digest(model)
    if job.model_uri is not None and not _all_same(collective, weights):
        saving = None  # the driver will say so, and keep what lies there
    digest = write_model(model, saving, folder, job.model_uri) if saving is not None else None
    return Trained(
        history={name: [plain(v) for v in values] for name, values in history.items()},
        rows=feed.rows,
        steps=steps,
        seconds=seconds,
        weights_sha256=weights,
        model_sha256=digest,
    )


def _all_same(collective: Collective, digest: str) -> bool:
    own = np.frombuffer(digest.encode(), np.uint8).copy()
    return len({part.tobytes() for part in collective.all_gather(own)}) == 1


def _feed(
    job: Job,
    collective: Collective,
    counts: Mapping[str, list[int]],
    folder: Path,
    model: Any,
    stream: Any,
) -> tuple[Feed | StreamFeed, Rows]:
    """The local batches, and rows like theirs."""
    if stream is not None:
        if job.workers > 1 and has_masked_loss(model):
            raise InputError(
                "masks reach the loss of this model, so that its steps must be weighted by what "
                "they hold: pass the rows themselves, not a function `data`"
            )
        from_function = StreamFeed(stream, collective, job.steps_per_epoch)
        return from_function, from_function.sample
    columns = reshape_rows(SpooledRows(folder / "train", job.in_memory), model)
    feed = Feed(
        columns,
        counts["train"],
        collective.rank,
        job.batch_size,
        seed=job.seed,
        shuffle=job.shuffle,
        limit=job.steps_per_epoch,
        batches=job.batches,
    )
    return feed, columns


def _fit(
    model: Any,
    collective: Collective,
    feed: Feed | StreamFeed,
    held_out: HeldOut | None,
    callbacks: list[Any],
    job: Job,
    emit: Emit,
) -> tuple[dict[str, list[Any]], int]:
    """History and steps taken."""
    options: dict[str, Any] = {"epochs": job.epochs, "verbose": 0, "shuffle": False}
    options |= feed.fit_options
    if job.class_weight is not None and isinstance(feed, Feed):
        options["class_weight"] = feed.with_all_classes(dict(job.class_weight))
    if collective.world_size == 1:
        sync = EpochSync(collective, Uncoupled(), feed, held_out, emit, job.epochs)
        # The feed shuffles; Keras is not asked to.
        fitted = model.fit(feed.dataset(), callbacks=[sync, *callbacks], **options)
        return dict(fitted.history), sync.steps_done
    _share_state(model, collective, emit)
    coupling = _coupling(model, collective, feed, job, emit)
    own = select_callbacks(collective.rank, callbacks)
    if any(isinstance(c, keras.callbacks.BackupAndRestore) for c in callbacks):
        options["initial_epoch"] = epoch_to_resume(callbacks, collective)
        own.append(ShareRestored(collective))
    sync = EpochSync(collective, coupling, feed, held_out, emit, job.epochs)
    last = StopTogether(collective, coupling, job.exchange.verify_weights)
    try:
        with coupling.installed():
            fitted = model.fit(feed.dataset(), callbacks=[sync, *own, last], **options)
    except tf.errors.OpError as error:
        raise coupling.error or error from None
    return dict(fitted.history), sync.steps_done


def _share_state(model: Any, collective: Collective, emit: Emit) -> None:
    """Give all ranks rank 0's weights, and tell where they were not equal before."""
    differing = ranks_that_differ(model, collective)
    if differing:
        text = (
            f"the first weights of worker {', '.join(map(str, differing))} differed from those of "
            "worker 0 (seeded by rank?): all start from worker 0's"
        )
        emit(Note(text))
    separate_randomness(model, collective.rank)
    broadcast_state(model, collective)


def _coupling(
    model: Any,
    collective: Collective,
    feed: Feed | StreamFeed,
    job: Job,
    emit: Emit,
) -> GradientExchange | LocalSteps:
    exchange = job.exchange
    if model.jit_compile and not is_plain(model) and isinstance(exchange, options.Exchange):
        text = "jit_compile is off: XLA cannot compile the exchange inside a train_step of your own"
        emit(Note(text))
        model.jit_compile = False
    nominal = collective.world_size * job.batch_size
    if isinstance(exchange, options.LocalSteps):
        return LocalSteps(
            model,
            collective,
            every=exchange.steps,
            learning_rate=exchange.learning_rate,
            momentum=exchange.momentum,
            may_be_empty=feed.may_be_empty,
            nominal_rows=nominal,
            compression=exchange.compression,
        )
    wire = Wire(nominal, exchange.bucket_mb * 1e6, exchange.compression)
    graph = None
    if exchange.transport == "tf":
        graph = GraphExchange(GraphReduce(job.workers, job.timeout), wire.bucket_bytes)
    return GradientExchange(model, collective, Position(feed), wire, feed.may_be_empty, graph)


def _build(model: Any, columns: Rows) -> None:
    """Create all weights and the optimizer's state, so that they can be made equal."""
    if not model.built:
        model(nest(make_zero_row(columns))[0])
    if model.compiled and model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _check_loss(model: Any, columns: Rows, job: Job) -> None:
    """Try the loss on two rows, where several workers average it and masks do not weight it."""
    count = len(columns)
    averaged = job.workers > 1 and isinstance(job.exchange, options.Exchange) and is_plain(model)
    if averaged and count and not has_masked_loss(model):
        # One row serves twice where there is no second.
        rows = [nest(columns.take(np.array([row]))) for row in (0, min(1, count - 1))]
        check_loss_is_mean(model, rows)
