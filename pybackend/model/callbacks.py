"""Callbacks of a training on several workers: what is one, and on which rank it runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import keras

from pybackend.errors import InputError
from pybackend.job.arguments import describe_stranger

# These write files: once is enough, and right only on one rank.
_RANK_0_ONLY = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)
# Keras says on the worker's standard error that they do nothing.
_MONITORING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
)


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Reject whatever is not a callback of Keras.

    Raises
    ------
    InputError
        Names its class.
    """
    for callback in callbacks:
        if isinstance(callback, type) and issubclass(callback, keras.callbacks.Callback):
            name = callback.__name__
            raise InputError(f"`callbacks` holds the class {name}: pass an object, {name}(...)")
        if not isinstance(callback, keras.callbacks.Callback):
            raise InputError(describe_stranger(callback))


def select_callbacks(rank: int, callbacks: Sequence[Any]) -> list[Any]:
    """Callbacks that run on one rank.

    Those that write files run on rank 0 alone, and so do others that have an attribute
    ``rank_0_only`` that is true.
    """
    return [c for c in callbacks if rank == 0 or not _is_rank_0_only(c)]


def find_unmonitored(callbacks: Sequence[Any], names: Collection[str]) -> list[tuple[str, str]]:
    """Callbacks that act on a figure which epochs do not have, by class, and the figure's name."""
    return [
        (type(callback).__name__, callback.monitor)
        for callback in callbacks
        if isinstance(callback, _MONITORING)
        and getattr(callback, "save_best_only", True)  # others save after each epoch
        and callback.monitor not in names
    ]


def _is_rank_0_only(callback: Any) -> bool:
    return isinstance(callback, _RANK_0_ONLY) or bool(getattr(callback, "rank_0_only", False))
