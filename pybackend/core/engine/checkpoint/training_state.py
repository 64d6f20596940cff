"""Read and restore the state that training changes on one worker, including callbacks."""

from __future__ import annotations

import hashlib
import inspect
import os
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
import numpy as np

from pybackend.core.collective import Collective, broadcast_value, gather_values
from pybackend.core.engine.exchange.synchronizer import Synchronizer
from pybackend.core.errors import ClusterError, InputError, SerializationError
from pybackend.core.job.report import Audit, Generation
from pybackend.core.job.value_codec import encode_state
from pybackend.core.model.callbacks import select_callbacks
from pybackend.core.model.view import ModelView, has_own, list_other_variables


@dataclass(frozen=True)
class TrainingStart:
    """Start of a training run: after ``epoch`` epochs, and ``step`` steps of the next.

    ``state`` is None if training is not resumed. ``generations`` are those before, if it resumes an
    elastic training run. ``audit`` has the results of the audits before.
    """

    epoch: int
    step: int = 0
    is_stopped: bool = False
    state: Any = None
    generations: tuple[Generation, ...] = ()
    audit: Audit | None = None

    @property
    def is_within_epoch(self) -> bool:
        """True if training resumes partway through an epoch."""
        return self.step > 0


# Attributes that belong to the current training.
_NOT_KEPT = {"params", "_model"}
# Longer values, in bytes, are described by their digest.
_SHOWN_BYTES = 250


def describe_callback(callback: Any) -> dict[str, str]:
    """Return the attributes that a checkpoint stores, as strings that differ if the values do."""
    return _describe_all(_read(callback))


def read_callback(callback: Any, first: Mapping[str, str]) -> dict[str, Any]:
    """Return the attributes of a callback that are plain data, or names of Keras operations.

    ``first`` is the result of `describe_callback` before training began.
    """
    state = _read(callback)
    now = _describe_all(state)
    parameters = inspect.signature(type(callback).__init__).parameters
    settings = {
        name: text for name, text in first.items() if now.get(name) == text or name in parameters
    }
    changed = [name for name in now if now[name] != first.get(name)]
    log = measure_log(callback)
    return {**state, "settings": settings, "changed": changed, "log": log}


def restore_callback(callback: Any, state: Mapping[str, Any], first: Mapping[str, str]) -> None:
    """Restore the attributes that `read_callback` read; paths are not changed.

    ``first`` is the result of `describe_callback` before this training run began. Raises
    `InputError` if a setting differs: an attribute that training had not changed, or a parameter of
    the class.
    """
    here = {name for name, text in state["settings"].items() if first.get(name) != text}
    for name in sorted(here):
        there, own = state["settings"][name], first.get(name, "missing")
        if not (_is_path(there) and _is_path(own)):
            raise InputError(
                f"callback {type(callback).__name__}: its {name} is {there} in the checkpoint, "
                f"but {own} now. Pass the old value, set it in `on_train_begin` if it is not a "
                "setting, or choose another folder"
            )
    unchanged = (here - set(state["changed"])) | _find_derived_paths(callback)
    operations = {name: getattr(keras.ops, one) for name, one in state["operations"].items()}
    for name, value in {**state["values"], **operations}.items():
        if name not in unchanged and _may_have(callback, name):
            setattr(callback, name, value)
    if "filename" not in here:
        cut_log(callback, state["log"])


def find_lost(callbacks: Iterable[Any]) -> list[str]:
    """Return attributes of custom callbacks that are not plain data, as ``Class.name``."""
    return [
        f"{type(callback).__name__}.{name}"
        for callback in callbacks
        if type(callback).__module__.partition(".")[0] != "keras"
        for name, value in vars(callback).items()
        if name not in _NOT_KEPT
        and not callable(value)
        and not isinstance(value, os.PathLike)
        and not _is_plain(value)
    ]


def _read(callback: Any) -> dict[str, dict[str, Any]]:
    """Return plain attributes, and the names of operations.

    Keras's monitoring callbacks choose an operation (``keras.ops.less``) once, and adjust their
    ``min_delta`` to it, so both must be restored together.
    """
    # Keras reads from the file whether it has a header.
    is_log = isinstance(callback, keras.callbacks.CSVLogger)
    not_kept = {*_NOT_KEPT, "append_header"} if is_log else _NOT_KEPT
    kept = {name: value for name, value in vars(callback).items() if name not in not_kept}
    found = {name: _find_operation(value) for name, value in kept.items()}
    operations = {name: one for name, one in found.items() if one}
    values = {n: v for n, v in kept.items() if n not in operations and _is_plain(v)}
    return {"values": values, "operations": operations}


def _describe_all(state: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    shown = {name: _describe(value) for name, value in state["values"].items()}
    return {**shown, **state["operations"]}


def _describe(value: Any) -> str:
    value = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
    encoded = encode_state(value)
    if len(encoded) <= _SHOWN_BYTES or isinstance(value, str):
        return repr(value)
    return f"a {type(value).__name__} with digest {hashlib.sha256(encoded).hexdigest()[:12]}"


def _find_derived_paths(callback: Any) -> set[str]:
    """Return the folders of a `TensorBoard`: it derives them from `log_dir` when it begins."""
    if not isinstance(callback, keras.callbacks.TensorBoard):
        return set()
    return {n for n, v in vars(callback).items() if isinstance(v, str) and _is_path(repr(v))}


def _is_path(shown: str) -> bool:
    """Return whether a described attribute is text that may be a path or a file name."""
    return shown[0] in "\"'" and any(mark in shown for mark in (".", "/", os.sep))


def _may_have(callback: Any, name: str) -> bool:
    """Return whether `read_callback` may have found this; false for methods and properties."""
    if name in vars(callback):
        return name not in _NOT_KEPT
    # Training may have added it, perhaps over a default of the class.
    default = getattr(type(callback), name, None)
    return name not in _NOT_KEPT and (_is_plain(default) or _find_operation(default) is not None)


def _find_operation(value: Any) -> str | None:
    name = getattr(value, "__name__", None)
    is_known = isinstance(name, str) and callable(value) and hasattr(keras.ops, name)
    return name if is_known and getattr(keras.ops, str(name)) is value else None


def _is_plain(value: Any) -> bool:
    try:
        encode_state(value)
    except (SerializationError, RecursionError):
        return False
    return True


def continue_log(callback: Any) -> None:
    """Make a `CSVLogger` of a resumed training run append to its file."""
    if isinstance(callback, keras.callbacks.CSVLogger):
        callback.append = True


def measure_log(callback: Any) -> int | None:
    """Return the size of a `CSVLogger`'s file in bytes, if it is on this machine."""
    if not isinstance(callback, keras.callbacks.CSVLogger):
        return None
    return os.path.getsize(callback.filename) if os.path.isfile(callback.filename) else None


def cut_log(callback: Any, size: int | None) -> None:
    """Remove the rows that were written after the checkpoint, whose epochs are repeated."""
    now = measure_log(callback)
    if size is not None and now is not None and now > size:
        # Keras opened the file to append: it continues at the new end.
        os.truncate(callback.filename, size)
        if not size:
            callback.append_header = True


_DIGEST_BYTES = 16
# Position of Keras's history among the callbacks.
HISTORY = -1
# Key of a learning rate that replaces the saved one.
RATE = "learning_rate"


def change_rate(optimizer: Any, state: Mapping[str, Any]) -> None:
    """Set the learning rate of a training run that resumes with another one.

    Raises `InputError` if callbacks had changed the rate: whether theirs or the new one should hold
    is not known.
    """
    if RATE not in state:
        return
    there, here = state[RATE]
    saved = float(optimizer.learning_rate)
    if not np.isclose(saved, there, rtol=1e-6, atol=0.0):
        raise InputError(
            f"callbacks have changed the learning rate from {there:.7g} to {saved:.7g} since "
            f"training began: compile the model with {there:.7g}, as before, and have callbacks "
            "change it"
        )
    optimizer.learning_rate = here


def keep_callbacks(rank: int, callbacks: Sequence[Any]) -> dict[int, Any]:
    """Return the callbacks of a rank for `TrainingState`, and Keras's history."""
    own = select_callbacks(rank, callbacks)
    listed = {n: one if one in own else None for n, one in enumerate(callbacks)}
    return {HISTORY: keras.callbacks.History(), **listed}


class StatefulSync(Protocol):
    """Methods of `sync.EpochSync` that a lifecycle needs."""

    def read_state(self) -> dict[str, Any]: ...
    def restore_state(self, state: Mapping[str, Any]) -> None: ...
    def begin_part(self) -> None: ...


class TrainingState:
    """State of training on one worker, which can be read and restored.

    ``callbacks`` are those whose attributes are stored, as they were before training, by position
    in the argument ``callbacks``; None for one that does not run on this rank. ``first`` has the
    descriptions of the callbacks before this process trained with them, by their position; missing
    ones are added. With ``is_elastic``, any number of workers can resume from this state, even
    within an epoch: nothing in it then depends on how rows were assigned to workers.
    """

    def __init__(
        self,
        model: Any,
        sync: StatefulSync,
        synchronizer: Synchronizer,
        callbacks: Mapping[int, Any | None],
        first: dict[int, dict[str, str]] | None = None,
        is_elastic: bool = False,
    ) -> None:
        self._model, self._sync, self._synchronizer = model, sync, synchronizer
        self._shards, self._is_elastic = synchronizer.shards, is_elastic
        self._indices = sorted(callbacks)
        self._callbacks = {n: one for n, one in callbacks.items() if one is not None}
        self._first = {} if first is None else first
        # Those of rank 0 that do not run on this one.
        self._others: dict[int, Any] = {}
        for number in self._callbacks.keys() - self._first.keys():
            self._first[number] = describe_callback(self._callbacks[number])

    def gather(self, collective: Collective, is_within_epoch: bool) -> bytes:
        """Return, on rank 0, everything that `restore` needs on every rank; elsewhere, nothing.

        Most variables and callbacks are the same on all ranks: the others send only those that
        differ from rank 0's.
        """
        is_within_epoch = is_within_epoch and not self._is_elastic
        arrays = self._read_variables(is_within_epoch)
        callbacks = self._read_callbacks()
        encoded = [np.frombuffer(encode_state(callbacks.get(n)), np.uint8) for n in self._indices]
        digests = np.stack([_digest(array) for array in [*encoded, *arrays]])
        differs = np.any(collective.all_gather(digests)[0] != digests, axis=1)
        of_callbacks, of_arrays = np.split(differs, [len(encoded)])
        is_sent = dict(zip(self._indices, of_callbacks | (collective.rank == 0), strict=True))
        own = {
            "differing": {n: arrays[n] for n in np.flatnonzero(of_arrays).tolist()},
            "callbacks": {n: one for n, one in callbacks.items() if is_sent[n]},
            "within_epoch": is_within_epoch,
            **self._read_own(),
        }
        ranks = gather_values(collective, own)
        if self._shards is not None:
            first = self._count_before_optimizers()
            for number, value in enumerate(self._shards.gather(), first):
                arrays[number] = value
        if collective.rank:
            return b""
        return encode_state({"variables": arrays, "ranks": ranks})

    def read(self, collective: Collective) -> bytes:
        """Return what `restore` needs, on any rank, to get back to this state between epochs.

        Each rank stores its own callbacks, and those of rank 0 that do not run on it.
        """
        callbacks = self._read_callbacks()
        is_lacking = np.array([n not in callbacks for n in self._indices], np.int64)
        is_shared = np.any(collective.all_gather(is_lacking), axis=0)
        own = {
            n: callbacks[n]
            for n, is_it in zip(self._indices, is_shared, strict=True)
            if is_it and n in callbacks
        }
        self._others = broadcast_value(collective, own) if np.any(is_shared) else {}
        return encode_state(self.read_alone())

    def read_alone(self) -> dict[str, Any]:
        """Return the same as `read`, with what rank 0 sent when it was last called."""
        callbacks = {**self._others, **self._read_callbacks()}
        own_state = {"differing": {}, "callbacks": callbacks, "within_epoch": False}
        arrays = [np.array(v.numpy()) for v in self._variables(is_within_epoch=False)]
        ranks = [own_state | self._read_own()]
        return {"variables": arrays, "ranks": ranks, "is_stopped": self.is_stopped}

    @property
    def is_stopped(self) -> bool:
        """True if this rank has requested a stop, even if the request was not sent yet."""
        return bool(self._model.stop_training or self._synchronizer.agreement.is_requested)

    def write(self, arrays: Sequence[Any]) -> None:
        """Set the variables to the values that `read_alone` returned."""
        variables = self._variables(is_within_epoch=False)
        for variable, value in zip(variables, arrays, strict=True):
            variable.assign(value)

    def restore(self, state: Mapping[str, Any], rank: int, world_size: int) -> None:
        """Restore the state of a training run.

        If the number of workers differs, the random generators are not restored, and callbacks get
        the state of rank 0. Raises `InputError` if a setting of a callback has changed, and
        `ClusterError` if the number of variables differs.
        """
        ranks = state["ranks"]
        is_same_group = len(ranks) == world_size
        own = ranks[rank if is_same_group else 0]
        variables = self._variables(own["within_epoch"])
        seeds = {id(v) for v in list_other_variables(self._model)}
        if len(variables) != len(state["variables"]):
            raise ClusterError(
                f"the checkpoint has {len(state['variables'])} variables, but training "
                f"has {len(variables)} before its first step: create them in `__init__` or "
                "`build`, and train with the release of Keras that wrote the checkpoint"
            )
        for number, variable in enumerate(variables):
            if variable is not None and (is_same_group or id(variable) not in seeds):
                value = own["differing"].get(number, state["variables"][number])
                variable.assign(value)
        change_rate(self._model.optimizer, state)
        known = {**ranks[0]["callbacks"], **own["callbacks"]}
        self._others = {n: one for n, one in known.items() if n not in self._callbacks}
        for number, callback in self._callbacks.items():
            if number in known:
                restore_callback(callback, known[number], self._first[number])
        self._synchronizer.begin_training()
        self._sync.restore_state(own["sync"])
        if is_same_group:
            if own["synchronizer"]:
                self._synchronizer.restore_state(own["synchronizer"])
            version, numbers, gauss = own["random"]
            random.setstate((version, tuple(numbers.tolist()), gauss))
            np.random.set_state(own["numpy"])

    def read_weights(self) -> list[Any]:
        """Return a copy of the weights."""
        return [np.array(v.numpy()) for v in self._model.weights]

    def find_lost(self) -> list[str]:
        return find_lost(self._callbacks.values())

    def _read_callbacks(self) -> dict[int, Any]:
        return {n: read_callback(one, self._first[n]) for n, one in self._callbacks.items()}

    def _read_own(self) -> dict[str, Any]:
        version, numbers, gauss = random.getstate()
        return {
            "sync": self._sync.read_state(),
            # It depends on the number of workers; at the end of an epoch nothing is pending.
            "synchronizer": {} if self._is_elastic else self._synchronizer.read_state(),
            "random": (version, np.array(numbers, np.uint64), gauss),
            "numpy": tuple(np.random.get_state()),
        }

    def _read_variables(self, is_within_epoch: bool) -> list[Any]:
        """Return the values of `_variables`; empty for the state that a single rank has."""
        variables = self._variables(is_within_epoch)
        slots = self._shards.slots if self._shards else ()
        held = enumerate(slots, self._count_before_optimizers())
        apart = {number for number, one in held if one.holder is not None}
        return [
            np.empty(0) if number in apart else np.array(variable.numpy())
            for number, variable in enumerate(variables)
        ]

    def _count_before_optimizers(self) -> int:
        return len(self._model.weights) + len(list_other_variables(self._model))

    def _variables(self, is_within_epoch: bool) -> Sequence[Any]:
        """Return the weights, in order, then all other variables used in training.

        An optimizer's state that only other ranks have is None.

        Between epochs, this excludes the metrics of a model with a custom train_step, because only
        its first step creates them.
        """
        model, view = self._model, ModelView(self._model)
        found = [*model.weights, *list_other_variables(model)]
        slots = [one.variable for one in self._shards.slots] if self._shards else None
        found += view.optimizer_variables if slots is None else slots
        metrics = list(model.metrics_variables)
        listed = {id(v.value) for v in [*found, *metrics] if v is not None}
        found += metrics if is_within_epoch or not has_own(model, "train_step") else []
        return [*found, *(v for v in view.list_variables() if id(v) not in listed)]


def _digest(array: Any) -> Any:
    content = np.ascontiguousarray(array).tobytes()
    digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
    return np.frombuffer(digest, np.uint8)
