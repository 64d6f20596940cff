"""Finds the checkpoint that a training resumes from, and gives it to all workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from pybackend.collective import Collective
from pybackend.data.checkpoint_checks import check_is_same
from pybackend.data.checkpoint_store import CheckpointStore, Kept, Manifest, Part
from pybackend.data.files import check_writable
from pybackend.data.state_file import decode_state
from pybackend.engine.checkpoint_writer import CheckpointWriter
from pybackend.engine.checkpointing import Checkpoints, Start
from pybackend.engine.save import SavingPlan
from pybackend.job.job import TrainingJob
from pybackend.job.messages import Emit, Note, Resumed
from pybackend.model.compare import hash_weights


def describe_model(
    job: TrainingJob, model: Any, plan: SavingPlan, inputs: Any, description: Mapping[str, Any]
) -> Manifest:
    """What all checkpoints of a training have in common, before its model was written."""
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
) -> Checkpoints:
    """The checkpoints of a job; rank 0 alone reads and writes them.

    Parameters
    ----------
    manifest
        On rank 0: what all checkpoints of this training have in common.
    write_model
        The file of the model, as it is before it is trained.

    Raises
    ------
    InputError
        The folder has checkpoints of another training, or some although the job is not to resume,
        or none that is intact.
    ClusterError
        They cannot be read at this time.
    """
    options = job.checkpoint
    assert options is not None
    if manifest is None:
        return Checkpoints(options, _share(None, job, collective))
    store = CheckpointStore(options.uri)
    check_writable(f"{options.uri.rstrip('/')}/checkpoint")
    store.open()
    kept = _find(store, job, manifest, emit)
    if kept is None or kept.model is None:
        model = store.write_model(write_model(), manifest.model_format)
        manifest = replace(manifest, model=model)
    else:  # the file of the model lies there, too
        there = kept.manifest
        manifest = replace(manifest, model=there.model, model_format=there.model_format)
        manifest = replace(manifest, model_weights=there.model_weights)
    writer = CheckpointWriter(store, options.keep, emit)
    return Checkpoints(options, _share(kept, job, collective), store, writer, manifest)


def _find(store: CheckpointStore, job: TrainingJob, own: Manifest, emit: Emit) -> Kept | None:
    """The newest checkpoint, if there is one and the job is to resume."""
    if not job.resume:
        store.check_is_empty()
        return None
    kept = store.find_newest(lambda text: emit(Note(text)))
    if kept is None:
        emit(Note(f"there is no checkpoint at {store.uri!r}: the training starts from scratch"))
        return None
    check_is_same(store.uri, kept.manifest, job, own.job)
    emit(Note(f"the training goes on from the checkpoint of {kept.manifest.place}"))
    emit(Resumed(kept.manifest.place))
    return kept


def _share(kept: Kept | None, job: TrainingJob, collective: Collective) -> Start:
    """Where the training begins, on all ranks, with the state that rank 0 has read."""
    place = np.array([job.initial_epoch, 0, 0, 0], np.int64)
    if kept is not None:
        there = kept.manifest
        place[:] = there.epoch, there.step, there.is_stopped, len(kept.state)
    collective.broadcast(place)
    epoch, step, is_stopped, size = map(int, place)
    if not size:
        return Start(epoch)
    content = np.zeros(size, np.uint8)
    if kept is not None:
        content[:] = np.frombuffer(kept.state, np.uint8)
    collective.broadcast(content)
    return Start(epoch, step, bool(is_stopped), decode_state(content.tobytes()))
