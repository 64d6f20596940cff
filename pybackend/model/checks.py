"""Models and callbacks whose distributed training would not equal a single process's.

Each is refused by name before training starts: a wrong result would look like a right one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from pybackend.errors import InputError
from pybackend.job.job import Job
from pybackend.job.options import Exchange, LocalSteps
from pybackend.model.layers import all_layers, flat
from pybackend.model.masks import check_masks, masks_reach_the_loss

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
    _check_optimizers(model, job)
    if isinstance(job.exchange, Exchange):
        _check_losses(model)
        check_masks(model)
        if job.exchange.transport == "tf" and masks_reach_the_loss(model):
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


def check_loss_of_rows(model: Any, rows: Sequence[Any]) -> None:
    """Refuse a loss that is no mean over rows: only such a one can be averaged over workers.

    A mean over two rows is the mean of what each gives by itself. Sums are not, nor are losses
    that compare the rows of a batch, wherever they come from: the loss, `add_loss`, a regularizer
    of activities, a `compute_loss` of the user's own.

    Parameters
    ----------
    rows
        Two data sets (x, y) or (x, y, sample_weight) of one row each.
    """
    both = keras.tree.map_structure(lambda *parts: np.concatenate(parts), *rows)
    apart = [_loss_of(model, *row) for row in rows]
    together = _loss_of(model, *both)
    expected = sum(apart) / len(apart)
    # Half precision rounds at the third digit.
    is_half = any("16" in str(layer.compute_dtype) for layer in all_layers(model))
    bound = (0.01 if is_half else 1e-4) * max(abs(together), abs(expected), 1e-3)
    if abs(together - expected) > bound:
        raise InputError(
            f"the loss of two rows is {together:.6g}, but {apart[0]:.6g} and {apart[1]:.6g} for "
            "each by itself: it is no mean over the rows of a batch, so it cannot be averaged over "
            "workers. Return one value per row from a loss (leave out the axis 0), and give "
            "`add_loss` a mean"
        )


def _loss_of(model: Any, x: Any, y: Any, sample_weight: Any = None) -> float:
    y_pred = model(x, training=False)
    given = {"x": x, "y": y, "y_pred": y_pred, "sample_weight": sample_weight}
    if "training" in inspect.signature(model.compute_loss).parameters:
        given["training"] = False
    return float(model.compute_loss(**given))


def unsummed_metrics(model: Any) -> list[str]:
    """Names of metrics of the user's own classes: whether their state sums up, only they know."""
    return [
        metric.name
        for container in model.metrics
        for metric in getattr(container, "metrics", [container])
        if not type(metric).update_state.__module__.startswith("keras.")
    ]


def _check_optimizers(model: Any, job: Job) -> None:
    optimizer = model.optimizer
    if not type(optimizer).apply_gradients.__module__.startswith("keras."):
        raise InputError(
            f"the optimizer {type(optimizer).__name__} has an apply_gradients of its own, which "
            "would see one worker's gradients: override `update_step` instead"
        )
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if isinstance(job.exchange, LocalSteps) and inner.use_ema:
        raise InputError(
            "`LocalSteps` and an optimizer with use_ema=True exclude each other: the moving "
            "averages would be each worker's own"
        )
    # A loss-scaling optimizer keeps the one it wraps in an attribute of its own, not the model's.
    others = [
        name
        for part in [model, *all_layers(model)]
        for name, value in vars(part).items()
        if any(
            isinstance(leaf, keras.optimizers.Optimizer) and leaf is not model.optimizer
            for leaf in flat(value)
        )
    ]
    if others:
        raise InputError(
            f"the model holds further optimizers ({', '.join(sorted(others))}): only the one "
            "given to compile() is averaged over the workers"
        )


def _check_losses(model: Any) -> None:
    for loss in flat(model.loss):
        if isinstance(loss, keras.losses.Circle):
            raise InputError(
                "the loss Circle compares the rows of a batch with each other, of which a worker "
                "sees only its own"
            )
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
