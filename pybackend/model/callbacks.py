"""Callbacks of a training on several workers: what is one, and on which rank it runs."""

from __future__ import annotations

from collections.abc import Sequence
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


def _is_rank_0_only(callback: Any) -> bool:
    return isinstance(callback, _RANK_0_ONLY) or bool(getattr(callback, "rank_0_only", False))
