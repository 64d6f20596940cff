"""Models and callbacks whose distributed training would not equal a single process's.

Each is refused by name before training starts: a wrong result would look like a right one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from pybackend.engine.masks import all_layers, check_masks, masks_reach_the_loss
from pybackend.errors import InputError
from pybackend.job import Job

# These write files: once is enough, and right only on one rank.
_RANK_0_ONLY = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.BackupAndRestore,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)
_MEANS = ("sum_over_batch_size", "mean")


def check_model(model: Any, job: Job) -> None:
    """Refuse what cannot be trained exactly by the workers of a job.

    Raises
    ------
    InputError
        Names the part of the model and what to use instead.
    """
    if not isinstance(model, keras.Model):
        raise InputError(f"expected a Keras model, not {type(model).__name__}")
    if job.kind == "predict":
        return
    if not model.compiled or model.optimizer is None:
        raise InputError(
            "the model is not compiled: call model.compile(optimizer, loss, ...) first"
        )
    if keras.config.backend() != "tensorflow":
        raise InputError(
            f"Keras runs on {keras.config.backend()!r}; set KERAS_BACKEND=tensorflow before "
            "Keras is first imported"
        )
    if job.workers == 1 or job.kind != "train":
        return
    _check_optimizers(model)
    if job.local_steps == 1:
        _check_losses(model)
        check_masks(model)
        if job.transport == "tf" and masks_reach_the_loss(model):
            raise InputError("a model whose masks reach the loss needs transport='tcp'")
    _check_layers(model)


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Refuse callbacks that are none."""
    for callback in callbacks:
        name = type(callback).__name__
        if not isinstance(callback, keras.callbacks.Callback):
            raise InputError(f"`callbacks` holds {name}, which is no keras.callbacks.Callback")


def callbacks_for(rank: int, callbacks: Sequence[Any]) -> list[Any]:
    """Callbacks that run on one rank: those that write files run on rank 0 alone."""
    return [c for c in callbacks if rank == 0 or not isinstance(c, _RANK_0_ONLY)]


def check_loss_of_rows(model: Any, rows: tuple[Any, ...]) -> None:
    """Refuse a loss of the user's own that gives one number for a whole batch.

    Keras takes such a number as it is, so it may be a sum as well as a mean: only a loss per row
    can be averaged over workers. ``rows`` are two rows (x, y) of the training data.
    """
    loss = model.loss
    fn = loss.call if isinstance(loss, keras.losses.Loss) else loss
    if not callable(fn) or str(getattr(fn, "__module__", "")).startswith("keras."):
        return
    value = fn(keras.ops.convert_to_tensor(rows[1]), model(rows[0]))
    if len(value.shape) == 0:
        name = getattr(loss, "name", None) or getattr(loss, "__name__", "loss")
        raise InputError(
            f"the loss {name!r} returns one number for a batch; return one per row, so that it "
            "can be averaged over the rows of all workers (for a mean, leave out the axis 0)"
        )


def unsummed_metrics(model: Any) -> list[str]:
    """Names of metrics of the user's own classes: whether their state sums up, only they know."""
    return [
        metric.name
        for container in model.metrics
        for metric in getattr(container, "metrics", [container])
        if not type(metric).update_state.__module__.startswith("keras.")
    ]


def _check_optimizers(model: Any) -> None:
    # A loss-scaling optimizer keeps the one it wraps in an attribute of its own, not the model's.
    others = [
        name
        for part in [model, *all_layers(model)]
        for name, value in vars(part).items()
        if any(
            isinstance(leaf, keras.optimizers.Optimizer) and leaf is not model.optimizer
            for leaf in _flat(value)
        )
    ]
    if others:
        raise InputError(
            f"the model holds further optimizers ({', '.join(sorted(others))}): only the one "
            "given to compile() is averaged over the workers"
        )


def _check_losses(model: Any) -> None:
    for loss in _flat(model.loss):
        reduction = getattr(loss, "reduction", "sum_over_batch_size")
        if reduction not in _MEANS:
            name = getattr(loss, "name", type(loss).__name__)
            raise InputError(
                f"the loss {name!r} has reduction={reduction!r}: workers average gradients by "
                "their rows, so use reduction='sum_over_batch_size'"
            )


def _check_layers(model: Any) -> None:
    for layer in all_layers(model):
        if getattr(layer, "stateful", False):
            raise InputError(
                f"layer {layer.name!r} has stateful=True: its state belongs to the rows that one "
                "worker has seen. Use stateful=False"
            )
        if getattr(layer, "synchronized", False):
            raise InputError(
                f"layer {layer.name!r} has synchronized=True, which Keras would compute on each "
                "worker's own rows: use synchronized=False (its moving statistics are averaged "
                "over the workers after each epoch)"
            )


def _flat(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for item in value.values() for leaf in _flat(item)]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    return [] if value is None else [value]
