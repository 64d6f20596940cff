"""Start and end of training, and the state saved in between.

`Lifecycle` saves nothing, `CheckpointedLifecycle` saves checkpoints and resumes from them, and
`elastic.generations` has the lifecycle of an elastic training run. `train` calls the methods of
whichever is used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np

from pybackend.core.collective import Collective, all_gather_values, broadcast_bytes
from pybackend.core.data.checkpoint_checks import (
    check_is_same,
    describe_settings,
    shorten,
    show_argument,
)
from pybackend.core.data.checkpoint_store import CheckpointStore, Manifest, Part, SavedCheckpoint
from pybackend.core.data.files import check_writable
from pybackend.core.data.rows import Rows, ShardedRows
from pybackend.core.engine import equal_state
from pybackend.core.engine.checkpoint import checkpointing, training_state
from pybackend.core.engine.evaluation import build_metrics
from pybackend.core.engine.exchange.synchronizer import Preemption, Synchronizer
from pybackend.core.engine.replica import Replica
from pybackend.core.engine.row_batches import PipelineBatches, RowBatches
from pybackend.core.engine.save import SavingPlan, encode_trained
from pybackend.core.errors import InputError
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.job import TrainingJob, argument_of
from pybackend.core.job.messages import Emit, Note, Resumed
from pybackend.core.job.notice import Notice
from pybackend.core.job.report import Audit, Generation, resume_generations
from pybackend.core.job.storage_options import Checkpoint
from pybackend.core.job.value_codec import decode_state, encode_state
from pybackend.core.model.compare import hash_weights
from pybackend.core.model.compile_settings import describe_rate, describe_structure
from pybackend.core.model.view import has_own
from pybackend.core.words import show


class Lifecycle:
    """Lifecycle of a training run that saves no state before it ends."""

    preemption: Preemption | None = None
    """How workers leave before the end, or None if they may not."""

    def __init__(self, job: TrainingJob) -> None:
        self.job = job
        self.start = training_state.TrainingStart(job.initial_epoch)
        """Start of training; known after `begin`."""
        self.audit = Audit()
        """Result of the audits, which are added to it."""
        self._checkpoints: checkpointing.Checkpoints | None = None
        self._saver: checkpointing.Saver | None = None

    def seed(self, rank: int) -> None:
        """Seed random numbers differently on each rank."""
        keras.utils.set_random_seed((self.job.seed + rank) % 2**32)

    def begin(self, replica: Replica) -> None:
        """Determine where training begins, and prepare the replica for it."""

    def share_state(self, replica: Replica) -> None:
        """Send rank 0's weights and optimizer state to all ranks."""
        if replica.collective.world_size > 1:
            equal_state.offset_seeds(replica.model, replica.rank)
            share_first_weights(replica)

    def make_callbacks(
        self, replica: Replica, sync: training_state.StatefulSync, synchronizer: Synchronizer
    ) -> list[Any]:
        """Return the callbacks that restore and save the state; Keras calls them last."""
        return []

    def finish(self) -> None:
        """Save what the last callbacks changed, and wait until everything is saved."""
        if self._saver is not None:
            self._saver.finish()
        if self._checkpoints is not None:
            self._checkpoints.wait(self.job.timeout)

    def close(self, replica: Replica) -> Callable[[], None] | None:
        """End after rank 0 has written the model; return a function that cleans up, or None."""
        if self._checkpoints is None or not self.job.discards_checkpoints:
            return None
        wait_for_all(replica)
        return partial(self._checkpoints.clear, self.job.timeout)


def share_first_weights(replica: Replica) -> None:
    """Send rank 0's weights to all ranks, which already have their own random numbers.

    Reports weights that differ between ranks; raises `InputError` if their shapes differ.
    """
    equal_state.check_structure(replica.model, replica.collective)
    if differing := equal_state.find_differing_weights(replica.model, replica.collective):
        text = (
            f"the initial weights of worker {', '.join(map(str, differing))} differed from those "
            "of worker 0 (seeded by rank?): all workers start with those of worker 0"
        )
        replica.emit(Note(text))
    equal_state.broadcast_state(replica.view, replica.collective)


def wait_for_all(replica: Replica) -> None:
    """Wait until rank 0 has written the model: until then another rank can take its place."""
    replica.collective.all_gather(np.zeros(1, np.int8))


def build_what_is_restored(replica: Replica) -> None:
    """Create the variables of the metrics, and the test function, before the first step."""
    build_metrics(replica.model, replica.rows)
    replica.model.make_test_function(force=True)


# Rows that are compared: a file of other rows differs in these, too.
_SAMPLED_ROWS = 512


def describe_training(
    job: TrainingJob,
    model: Any,
    callbacks: Sequence[Any],
    rows: Mapping[str, Rows | None],
    collective: Collective,
) -> dict[str, Any]:
    """Describe a training run as a mapping from argument names to JSON values.

    Rows are described for each rank; in elastic training, once, for any number of workers. ``rows``
    has this worker's, by data set; None if they cannot be read.
    """
    described = describe_settings(job)
    described["callbacks"] = [type(callback).__name__ for callback in callbacks]
    # First the differences that can be reported exactly.
    described["weights"] = [f"{v.dtype} {tuple(v.shape)}" for v in model.weights]
    described["model"] = shorten(describe_structure(model))
    described["learning_rate"] = describe_rate(model)
    for name, own in rows.items():
        found = None
        if own is not None and job.is_elastic:
            found = [_describe_rows(own.everything if isinstance(own, ShardedRows) else own)]
        elif own is not None:
            found = all_gather_values(collective, _describe_rows(own))
        described[argument_of(name)] = found
    return described


def _describe_rows(rows: Rows) -> list[Any]:
    """Return the number of rows and a digest of some of them."""
    digest, count = hashlib.blake2b(digest_size=16), len(rows)
    sampled = min(count, _SAMPLED_ROWS)
    chosen = np.arange(sampled, dtype=np.int64) * count // max(1, sampled)
    for name, column in rows.take(chosen).items() if count else ():
        array = np.asarray(column)
        content = repr(array.tolist()).encode() if array.dtype.kind == "O" else array.tobytes()
        digest.update(f"{name} {array.dtype} {array.shape}".encode() + content)
    return [count, digest.hexdigest()]


_ABOUT_PIPELINES = (
    "a resumed training run calls the `data` function again: its result equals that of an "
    "uninterrupted run if the function returns the same batches in every epoch"
)


class CheckpointedLifecycle(Lifecycle):
    """Lifecycle of a training run that saves its state in a folder and resumes from it."""

    def begin(self, replica: Replica) -> None:
        """Open the checkpoints, and prepare to resume; errors as in `open_checkpoints`."""
        job = self.job
        manifest, write = describe_replica(replica)
        checkpoints = open_checkpoints(job, replica.collective, manifest, write, replica.emit)
        self._checkpoints, self.start = checkpoints, checkpoints.start
        self.audit = self.start.audit or self.audit
        if isinstance(replica.batches, PipelineBatches):
            _check_pipeline(replica.batches, replica.emit)
        if self.start.state is not None:
            replica.batches.resume(job.initial_epoch)
        is_resumed = self.start.state is not None and not has_own(replica.model, "train_step")
        if is_resumed or self.start.is_within_epoch or replica.model.jit_compile:
            # XLA fuses a step differently if it creates these variables first.
            build_what_is_restored(replica)
        # Active to the end: by then all is saved.
        notice = Notice()
        notice.expect()
        # Within an epoch, the position in a pipeline could not be restored.
        is_any_step = isinstance(replica.batches, RowBatches)
        self.preemption = Preemption(replica.collective, notice, is_any_step)

    def make_callbacks(
        self, replica: Replica, sync: training_state.StatefulSync, synchronizer: Synchronizer
    ) -> list[Any]:
        assert self.preemption is not None
        assert self._checkpoints is not None
        stateful = training_state.keep_callbacks(replica.rank, replica.callbacks)
        state = training_state.TrainingState(replica.model, sync, synchronizer, stateful)
        whole = self.job.epochs, replica.collective, replica.emit
        self._saver = checkpointing.Saver(*whole, self._checkpoints, state, self.audit)
        own = self._saver, self.preemption, replica.batches
        writing = checkpointing.Checkpointing(*own, self.job.timeout)
        return [stateful[training_state.HISTORY], writing]


def describe_replica(replica: Replica) -> tuple[Manifest | None, Callable[[], bytes]]:
    """Return what all checkpoints have in common, and a function that encodes the model's file.

    All ranks call this together; the first value is None on all but rank 0.
    """
    job, model, plan = replica.job, replica.model, replica.plan
    rows = replica.rows if isinstance(replica.batches, RowBatches) else None
    sets = {"train": rows, "validation": replica.validation_rows}
    description = describe_training(job, model, replica.callbacks, sets, replica.collective)
    if plan is None:
        return None, bytes
    manifest = describe_model(job, model, plan, replica.inputs, description)
    return manifest, lambda: encode_trained(replica.loaded, plan)


def describe_model(
    job: TrainingJob, model: Any, plan: SavingPlan, inputs: Any, description: Mapping[str, Any]
) -> Manifest:
    """Return what all checkpoints of a training run have in common, before its model is written."""
    return Manifest(
        epoch=job.initial_epoch,
        step=0,
        workers=job.workers,
        seed=job.seed,
        is_stopped=False,
        job=description,
        model=Part("", ""),
        model_format=plan.format,
        model_weights=hash_weights(model),
        inputs=inputs,
    )


def open_checkpoints(
    job: TrainingJob,
    collective: Collective,
    manifest: Manifest | None,
    write_model: Callable[[], bytes],
    emit: Emit,
    generations: Sequence[Generation] = (),
    run: str | None = None,
) -> checkpointing.Checkpoints:
    """Open the checkpoints of a job; only rank 0 reads and writes them.

    On rank 0, ``manifest`` is what all checkpoints of this training run have in common, and
    ``write_model`` returns the file of the model before training. ``generations`` are those of this
    call, if the training run is elastic; ``run`` is as in `CheckpointStore`.

    Raises `InputError` if the folder has checkpoints of another training run, has checkpoints
    although the job does not resume, or has only damaged ones; and `ClusterError` if the
    checkpoints cannot be read at the moment.
    """
    options = job.checkpoint
    assert options is not None
    if manifest is None:
        return checkpointing.Checkpoints(options, _share(None, job, collective))
    writer = _open_writer(options, run, emit)
    newest = _find(writer.store, job, manifest, emit)
    saved = newest.manifest if newest is not None else None
    groups = _list_groups(job, saved, generations)
    generations, fixed = (groups, ()) if generations else ((), groups)
    if saved is not None:
        emit(Resumed(saved.point, generations))
    known = newest.manifest if newest is not None and newest.model is not None else None
    manifest = _choose_model(writer.store, manifest, known, write_model)
    manifest = replace(manifest, generations=generations, fixed=fixed)
    return checkpointing.Checkpoints(options, _share(newest, job, collective), writer, manifest)


def _list_groups(
    job: TrainingJob, saved: Manifest | None, generations: Sequence[Generation]
) -> tuple[Generation, ...]:
    """Return the worker groups from the beginning of the training run; empty if not known.

    ``saved`` is the checkpoint that the job resumes from; ``generations`` as in `open_checkpoints`.
    """
    own = generations or (Generation(job.initial_epoch + 1, list(range(job.workers))),)
    if saved is None:
        return tuple(own)
    before = saved.generations or saved.fixed
    if not generations and (saved.step or not before):  # the same workers, or an older release
        return before
    return resume_generations(before, own, saved.epoch, saved.step)


def continue_checkpoints(
    options: Checkpoint,
    manifest: Manifest,
    write_model: Callable[[], bytes],
    emit: Emit,
    start: training_state.TrainingStart,
    known: checkpointing.Checkpoints | None,
    run: str,
) -> checkpointing.Checkpoints:
    """Continue the checkpoints of other workers of the same training run, on rank 0.

    Arguments as in `open_checkpoints`. ``known`` are checkpoints that this process has written
    until now; None: another process has.
    """
    if known is not None and known.writer is not None:
        writer, there = known.writer, known.manifest
    else:
        writer = _open_writer(options, run, emit)
        there = writer.store.read_manifest()
    manifest = _choose_model(writer.store, manifest, there, write_model)
    return checkpointing.Checkpoints(options, start, writer, manifest)


def _open_writer(
    options: Checkpoint, run: str | None, emit: Emit
) -> checkpointing.CheckpointWriter:
    store = CheckpointStore(options.uri, run)
    check_writable(f"{options.uri.rstrip('/')}/checkpoint", "recovery")
    store.open()
    return checkpointing.CheckpointWriter(store, options.keep, emit)


def _choose_model(
    store: CheckpointStore, own: Manifest, there: Manifest | None, write: Callable[[], bytes]
) -> Manifest:
    """Return the manifest with the model's file of earlier checkpoints, or with a new one."""
    if there is None:
        return replace(own, model=store.write_model(write(), own.model_format))
    own = replace(own, model=there.model, model_format=there.model_format)
    # Callbacks may have frozen layers since.
    job = {**own.job, "model": there.job["model"]}
    return replace(own, model_weights=there.model_weights, job=job)


def _find(
    store: CheckpointStore, job: TrainingJob, own: Manifest, emit: Emit
) -> SavedCheckpoint | None:
    """Return the newest checkpoint, if there is one and the job resumes."""
    if job.checkpoint is None or not job.checkpoint.resume:
        store.check_is_empty()
        return None
    newest = store.find_newest(lambda text: emit(Note(text)))
    if newest is None:
        emit(Note(f"there is no checkpoint at {show(store.uri)}: training starts from scratch"))
        return None
    check_is_same(store.uri, newest.manifest, job, own.job)
    emit(Note(f"training resumes from the checkpoint of {newest.manifest.point}"))
    if newest.manifest.workers != job.workers and not (job.is_elastic or job.shuffles_globally):
        emit(Note("with another number of workers, only the number of rows is compared"))
    there, here = (one.job.get("learning_rate") for one in (newest.manifest, own))
    if there == here:
        return newest
    if isinstance(here, float):
        # It is a variable, which the checkpoint would restore.
        was, now = show_argument(there), show_argument(here)
        emit(Note(f"the learning rate was {was}, and is {now} from here on"))
        state = {**decode_state(newest.state), training_state.RATE: (there, here)}
        return replace(newest, state=encode_state(state))
    emit(Note("the learning rate has another schedule from here on"))
    return replace(newest, model=None)  # its file has the old one


def _share(
    newest: SavedCheckpoint | None, job: TrainingJob, collective: Collective
) -> training_state.TrainingStart:
    """Return on all ranks where training begins, with the state that rank 0 has read."""
    text = broadcast_bytes(collective, encode(newest.manifest).encode() if newest else b"")
    if not text:
        return training_state.TrainingStart(job.initial_epoch)
    own = decode(text, Manifest)
    state = decode_state(broadcast_bytes(collective, newest.state if newest else b""))
    where = own.epoch, own.step, own.is_stopped
    return training_state.TrainingStart(*where, state, own.generations, own.audit)


def _check_pipeline(batches: PipelineBatches, emit: Emit) -> None:
    """Report what the result of a pipeline depends on; raise `InputError` for endless data."""
    if batches.fit_options:
        raise InputError(
            "`recovery` needs a `data` function whose batches end with each epoch: the position "
            "in infinite data cannot be restored. Omit `steps_per_epoch`, or pass rows or files"
        )
    emit(Note(_ABOUT_PIPELINES))
