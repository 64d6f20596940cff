"""Checks of callbacks, and the ranks on which they run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from types import FunctionType
from typing import Any

import keras

from pybackend.core.errors import InputError
from pybackend.core.job.arguments import describe_stranger
from pybackend.core.job.pickling import list_parts
from pybackend.core.model.view import is_of_keras
from pybackend.core.words import setting

# These write files, which only one rank may do.
_RANK_0_ONLY = (
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.CSVLogger,
    keras.callbacks.TensorBoard,
    keras.callbacks.RemoteMonitor,
)
# If their metric is missing, Keras only warns on the worker's standard error.
_MONITORING = (
    keras.callbacks.EarlyStopping,
    keras.callbacks.ModelCheckpoint,
    keras.callbacks.ReduceLROnPlateau,
)


def check_callbacks(callbacks: Sequence[Any]) -> None:
    for callback in callbacks:
        if isinstance(callback, type) and issubclass(callback, keras.callbacks.Callback):
            kind = callback.__name__
            raise InputError(f"`callbacks` contains the class {kind}: pass an instance, {kind}()")
        if not isinstance(callback, keras.callbacks.Callback):
            raise InputError(describe_stranger(callback))


def check_sharded_callbacks(callbacks: Sequence[Any]) -> None:
    """Reject callbacks that use the optimizer's state of all weights."""
    for callback in callbacks:
        is_checkpoint = isinstance(callback, keras.callbacks.ModelCheckpoint)
        if is_checkpoint and not callback.save_weights_only:
            how = f"{setting(save_weights_only=True)}, or the argument `recovery`"
        elif isinstance(callback, keras.callbacks.SwapEMAWeights):
            how = setting(shard_optimizer=False)
        else:
            continue
        raise InputError(
            f"the callback {type(callback).__name__} needs the whole state of the optimizer, of "
            f"which each worker has only a part with `shard_optimizer`: use {how}"
        )


def select_callbacks(rank: int, callbacks: Sequence[Any]) -> list[Any]:
    """Return the callbacks that run on one rank.

    Callbacks that write files, and those whose attribute ``rank_0_only`` is true, run only on rank
    0.
    """
    if rank == 0:
        return list(callbacks)
    others = [one for one in callbacks if not isinstance(one, _RANK_0_ONLY)]
    return [one for one in others if not getattr(one, "rank_0_only", False)]


def counts_steps(callback: Any) -> bool:
    """Return whether a callback's state may change within an epoch."""
    if isinstance(callback, keras.callbacks.ModelCheckpoint):
        return bool(callback.save_freq != "epoch")
    return runs_in_steps(callback)


def runs_in_steps(callback: Any) -> bool:
    """Return whether a callback has user-defined code that runs before or after each step."""
    names = ("on_train_batch_begin", "on_train_batch_end", "on_batch_begin", "on_batch_end")
    return not all(is_of_keras(getattr(callback, name)) for name in names)


def find_unmonitored(callbacks: Sequence[Any], names: Collection[str]) -> list[tuple[str, str]]:
    return [
        (type(callback).__name__, callback.monitor)
        for callback in callbacks
        if isinstance(callback, _MONITORING)
        and getattr(callback, "save_best_only", True)  # others save after each epoch
        and callback.monitor not in names
    ]


# Lists and dicts that Keras fills itself, in all callbacks and in its `History`.
_OF_KERAS = ("params", "epoch")


def count_items(callbacks: Sequence[Any]) -> dict[str, int]:
    """Return the lengths of lists and dicts that user-defined code in callbacks may fill.

    These are attributes of custom callbacks, and what their methods, or the functions of a
    `LambdaCallback`, use.
    """
    found: dict[str, int] = {}
    for callback in callbacks:
        is_filled = _is_of_user(type(callback)) or isinstance(callback, keras.callbacks.History)
        for step, part in list_parts(callback, _is_of_user):
            parts = [(f"{type(callback).__name__}{step}", part)] * is_filled
            if isinstance(part, FunctionType):
                parts = list(list_parts(part, _is_of_user))
            for name, value in parts:
                last = name.rpartition(".")[2]
                is_own = not last.startswith("_") and last not in _OF_KERAS
                if is_own and isinstance(value, list | dict):
                    found[name.rpartition("`")[2]] = len(value)
    return found


def _is_of_user(owner: Any) -> bool:
    package = str(getattr(owner, "__module__", "")).partition(".")[0]
    return package not in ("keras", "tensorflow", "pybackend")
