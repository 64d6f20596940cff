"""One worker's training, from the files of its job to its report and, on rank 0, the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import numpy as np
import tensorflow as tf

from pybackend.collective import Collective
from pybackend.data.arrays import rows_of, structure
from pybackend.data.spool import read_columns
from pybackend.engine.checks import (
    callbacks_for,
    check_callbacks,
    check_loss_of_rows,
    check_model,
)
from pybackend.engine.exchange import GradientExchange
from pybackend.engine.feed import Feed, shaped_for
from pybackend.engine.sync import (
    EpochSync,
    StopTogether,
    broadcast_state,
    plain,
    separate_randomness,
    weights_digest,
)
from pybackend.errors import InputError, SerializationError
from pybackend.job import EXTRAS, MODEL_FILE, MODEL_FUNCTION, Job
from pybackend.serialization import Format, model_from_bytes, model_to_bytes, sha256_of


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
    counts: Mapping[str, list[int]],
    folder: Path,
    emit: Callable[[dict[str, Any]], object],
) -> Trained:
    """Train this worker's replica with the others.

    Parameters
    ----------
    counts
        Rows of every worker, by rank: of ``"train"`` and, where there is any, of
        ``"validation"`` data.
    folder
        The worker's own: ``train/``, ``validation/``, and ``model.keras`` or ``model.pkl`` go in,
        ``trained.h5`` or ``trained.keras`` comes out on rank 0.
    emit
        Called with an event per epoch.
    """
    rank = collective.rank
    keras.config.set_floatx(job.floatx)
    keras.config.set_dtype_policy(job.dtype_policy)
    keras.config.set_image_data_format(job.image_data_format)
    keras.utils.set_random_seed((job.seed + rank) % 2**32)
    extras = _unpickled(folder / EXTRAS) or {}
    model = _model(job, folder, extras.get("custom_objects"))
    columns = shaped_for(read_columns(folder / "train"), model)
    callbacks = list(extras.get("callbacks") or [])
    check_callbacks(callbacks)
    _build(model, columns)
    check_model(model)
    _check_loss(model, columns)
    if collective.world_size > 1 and model.jit_compile:
        emit({"event": "note", "text": "jit_compile is off: XLA cannot compile an exchange"})
        model.jit_compile = False
    kind = _loadable_format(model, job, extras.get("custom_objects")) if rank == 0 else None
    feed = Feed(
        columns,
        counts["train"],
        rank,
        job.batch_size,
        seed=job.seed,
        shuffle=job.shuffle,
        limit=job.steps_per_epoch,
    )
    validation = None
    if "validation" in counts:
        held_out = shaped_for(read_columns(folder / "validation"), model)
        # Evaluating exchanges nothing before its end: each worker takes the steps of its own rows.
        validation = Feed(held_out, [rows_of(held_out)], rank, job.batch_size)
    share = feed.rows / sum(counts["train"])
    sync = EpochSync(collective, feed, share, validation, emit, job.epochs)
    own = callbacks_for(rank, callbacks)
    began = time.monotonic()
    history = _fit(model, collective, feed, [sync, *own, StopTogether(collective)], job)
    seconds = time.monotonic() - began
    digest = _write_model(model, kind, folder) if kind is not None else None
    return Trained(
        history={name: [plain(v) for v in values] for name, values in history.items()},
        rows=feed.rows,
        steps=feed.steps * max(map(len, history.values()), default=0),
        seconds=seconds,
        weights_sha256=weights_digest(model),
        model_sha256=digest,
    )


def _fit(
    model: Any, collective: Collective, feed: Feed, callbacks: list[Any], job: Job
) -> dict[str, list[Any]]:
    def fit() -> dict[str, list[Any]]:
        # The feed shuffles; Keras is not asked to.
        fitted = model.fit(
            feed.dataset(), epochs=job.epochs, callbacks=callbacks, verbose=0, shuffle=False
        )
        return dict(fitted.history)

    if collective.world_size == 1:
        return fit()
    separate_randomness(model, collective.rank)
    broadcast_state(model, collective)
    if feed.may_be_empty and not _can_skip_steps(model):
        raise InputError(
            "some steps have no row for this worker, which is possible neither with "
            "run_eagerly=True nor with a train_step of your own: use fewer workers, a larger "
            "batch_size, or evenly spread rows"
        )
    exchange = GradientExchange(model, collective, feed.may_be_empty)
    try:
        with exchange.installed():
            return fit()
    except tf.errors.OpError as error:
        raise exchange.error or error from None


def _can_skip_steps(model: Any) -> bool:
    is_plain = type(model).train_step.__module__.startswith("keras.")
    return is_plain and not model.run_eagerly


def _unpickled(path: Path) -> Any:
    """Read a file that the launcher on this machine wrote from the driver's own objects."""
    return cloudpickle.loads(path.read_bytes()) if path.exists() else None


def _model(job: Job, folder: Path, custom_objects: Any) -> Any:
    if job.model_source == "function":
        model = _unpickled(folder / MODEL_FUNCTION)()
        if not isinstance(model, keras.Model):
            raise InputError(
                f"the `model` function returned {type(model).__name__}, not a Keras model"
            )
        return model
    return model_from_bytes(
        (folder / MODEL_FILE).read_bytes(),
        custom_objects=custom_objects,
        safe_mode=job.safe_mode,
    )


def _build(model: Any, columns: Any) -> None:
    """Create all weights and the optimizer's state, so that they can be made equal."""
    if not model.built:
        # One row of zeros has the right shape and type even where the shard is empty.
        row = {key: np.zeros((1, *a.shape[1:]), a.dtype) for key, a in columns.items()}
        model(structure(row)[0])
    if model.compiled and model.optimizer is not None and not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _loadable_format(model: Any, job: Job, custom_objects: Any) -> Format:
    """The format in which the driver will be able to load the model: HDF5 where it can be.

    Found before training: to fail after hours of it would be too late.
    """
    formats: tuple[Format, ...] = ("h5", "keras")
    failure: SerializationError | None = None
    for kind in formats:
        try:
            data = model_to_bytes(model, format=kind)
            model_from_bytes(
                data,
                custom_objects=custom_objects,
                safe_mode=job.safe_mode,
                sha256=sha256_of(data),
            )
            return kind
        except SerializationError as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _write_model(model: Any, kind: Format, folder: Path) -> str:
    data = model_to_bytes(model, format=kind)
    partial = folder / "trained.partial"
    partial.write_bytes(data)
    partial.replace(folder / f"trained.{kind}")
    return sha256_of(data)


def _check_loss(model: Any, columns: Any) -> None:
    """Try a loss of the user's own on two rows, where the model has one input and output."""
    if "x" in columns and "y" in columns and len(columns["x"]):
        x, y = columns["x"], columns["y"]
        # One row serves twice where there is no second.
        check_loss_of_rows(model, (_two(x), _two(y)))


def _two(rows: Any) -> Any:
    return np.concatenate([rows[:1], rows[min(1, len(rows) - 1) :][:1]])
