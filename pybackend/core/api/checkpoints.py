"""Load the model of a checkpoint, and check a call against a checkpoint before anything starts."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pybackend.core.api.calls import TrainingCall
from pybackend.core.api.observer import list_callbacks
from pybackend.core.data import checkpoint_checks
from pybackend.core.data.checkpoint_store import CheckpointStore
from pybackend.core.data.files import is_remote, local_path
from pybackend.core.errors import InputError
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.storage_options import Checkpoint, check_recovery, check_uri
from pybackend.core.quiet import import_tensorflow
from pybackend.core.words import setting, show

T = TypeVar("T")


def load_checkpoint(
    uri: str,
    *,
    model: Any = None,
    custom_objects: Mapping[str, Any] | None = None,
    safe_mode: bool = True,
) -> Any:
    """Load the model of the newest intact checkpoint of a training run.

    Damaged checkpoints are skipped with a warning.

    Parameters
    ----------
    uri
        The folder of `Recovery`.
    model
        A compiled model like the trained one, or a function that builds one; the weights are loaded
        into it. Needed for models that Keras cannot write to a file.
    custom_objects, safe_mode
        As in `load_model`.

    Returns
    -------
    keras.Model
        The model with the weights and the optimizer's state. In a checkpoint written partway
        through an epoch, the moving averages of batch normalization are those of worker 0. With
        `LocalSteps`, all weights are those of worker 0, because the workers' weights differ until
        they are averaged again.

    Raises
    ------
    InputError
        There is no intact checkpoint, or ``model`` is needed.
    ClusterError
        The files cannot be read at the moment.
    SerializationError
        The model cannot be read; see `load_model`.
    """
    store = CheckpointStore(check_uri(uri))
    # The warning names the caller: above it are the lambda, `find_newest` and this function.
    newest = store.find_newest(lambda text: warnings.warn(text, stacklevel=4))
    if newest is None:
        raise InputError(
            f"there is no checkpoint at {show(uri)}: pass the folder in `recovery` of a "
            "training run"
        )
    import_tensorflow()
    from pybackend.core.model.transfer import restore_saved

    return restore_saved(newest, model, custom_objects, safe_mode)


def resolve_checkpoint(call: TrainingCall) -> TrainingCall:
    """Return the call with a checked `Recovery`.

    A `BackupAndRestore` among the callbacks becomes its folder; a training run that resumes without
    a seed takes the seed from its checkpoint, if this process can read it. Checkpoints of a call
    that does not resume raise an `InputError`.
    """
    adopted = _adopt_backup(call)
    try:
        return _resolve(adopted)
    except InputError as error:
        if adopted is call:
            raise
        raise InputError(f"BackupAndRestore is replaced by `recovery`: {error}") from None


def _resolve(call: TrainingCall) -> TrainingCall:
    recovery = check_recovery(call.options["recovery"])
    call, checkpoint = call.with_options(recovery=recovery), recovery.checkpoint
    if checkpoint is None:
        return call
    if not is_remote(checkpoint.uri) and os.path.isfile(local_path(checkpoint.uri)):
        raise InputError(f"`recovery`: {show(checkpoint.uri)} is a file: specify a folder")
    if callable(call.data) and checkpoint.every != "epoch":
        raise InputError(
            f"`recovery` with a `data` function needs {setting(every='epoch')}: a pipeline can "
            "only be restored to the start of an epoch"
        )
    if not checkpoint.resume:
        _look(checkpoint, CheckpointStore.check_is_empty)
    elif call.options["seed"] is None:
        manifest = _look(checkpoint, CheckpointStore.read_manifest)
        return call.with_options(seed=None if manifest is None else manifest.seed)
    return call


def check_resumes(job: TrainingJob, rows: Mapping[str, int | None]) -> None:
    """Reject another training run's checkpoint before anything is started.

    ``rows`` are those of all workers together, by data set; None: not known yet.
    """
    if job.checkpoint is None or not job.checkpoint.resume:
        return
    uri, manifest = job.checkpoint.uri, _look(job.checkpoint, CheckpointStore.read_manifest)
    if manifest is not None:
        own = checkpoint_checks.describe_settings(job)
        checkpoint_checks.check_is_same(uri, manifest, job, own)
        checkpoint_checks.check_rows_are_as_many(uri, manifest, rows)


def has_checkpoint(checkpoint: Checkpoint | None) -> bool:
    """Return whether this process can see any checkpoint, intact or not."""
    return checkpoint is not None and bool(_look(checkpoint, CheckpointStore.names))


def _look(checkpoint: Checkpoint, look: Callable[[CheckpointStore], T]) -> T | None:
    """Return the result of ``look``; None if only the workers can read the folder and check it."""
    try:
        return look(CheckpointStore(checkpoint.uri))
    except InputError:
        raise
    except Exception:  # each file system has its own errors
        return None


def _adopt_backup(call: TrainingCall) -> TrainingCall:
    keras, callbacks = sys.modules.get("keras"), list_callbacks(call.options["callbacks"])
    if keras is None:
        return call
    backups = [c for c in callbacks if isinstance(c, keras.callbacks.BackupAndRestore)]
    if not backups:
        return call
    recovery = check_recovery(call.options["recovery"])
    if len(backups) > 1 or recovery.uri is not None:
        raise InputError(
            "pass either a folder in `recovery` or one BackupAndRestore callback, not both"
        )
    (backup,) = backups
    saved = replace(recovery, uri=str(backup.backup_dir), every=backup.save_freq, resume=True)
    others = [one for one in callbacks if one is not backup]
    call = replace(call, discards_checkpoints=bool(backup.delete_checkpoint))
    return call.with_options(callbacks=others, recovery=saved)
