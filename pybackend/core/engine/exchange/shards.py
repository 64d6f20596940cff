"""The optimizer's state in parts, one on each worker: `Exchange(shard_optimizer=True)`.

Stage 1 of Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
models" (2020). Each rank gets the mean gradients of its own weights, updates these with Keras's own
optimizer, and sends the new weights to the other ranks. A sum whose parts end up on different ranks
and a gather of the weights send as much as an all-reduce of the gradients, which consists of both.

A part consists of whole variables, so any optimizer that treats each variable separately does what
it does in one process, including those that use a variable's norm or its rows and columns. With P
bytes of weights, Adam's state takes 2 P on each rank without parts. With N parts it takes 2 P / N
if the variables can be divided evenly, and never more than the larger of 4/3 of that and twice the
largest variable (Graham's bound for assigning the largest first). A table of GPT-2 (38 of 124
million weights) is the worst common case: 0.6 P instead of 0.5 P with 4 workers. Parts of variables
would save these 0.1 of 4.5 P, but no longer allow optimizers such as LAMB, Muon and Adafactor.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import keras
import numpy as np
import tensorflow as tf

from pybackend.core.collective import Collective, all_gather_values
from pybackend.core.engine.exchange.flat_buffer import Parts
from pybackend.core.engine.step_changes import StepCalls, call_host, override
from pybackend.core.errors import InputError
from pybackend.core.model.compile_settings import open_optimizer_state
from pybackend.core.words import show_bytes

# In the name of a variable: its position among all.
_TAG = re.compile(r"_tfdist(\d+)")


def assign_owners(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return a rank for each variable: the largest first, each to the rank that has the least."""
    owners, totals = [0] * len(sizes), [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda n: (-sizes[n], n)):
        owners[number] = int(np.argmin(totals))
        totals[owners[number]] += max(1, sizes[number])  # so that each rank has a variable
    return owners


@dataclass(frozen=True)
class Slot:
    """A variable of the whole state of an optimizer; None if it is only on another rank.

    ``holder`` is the rank that has it, None if all ranks have it.
    """

    variable: Any
    holder: int | None
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class Shards:
    """Parts of the optimizer's state of one model, and the rank that has each of them.

    The compiled model's weights must be the same on all ranks. ``stored`` is a ``.keras`` file with
    state that the model's optimizer does not have yet; ``custom_objects`` are classes and functions
    that the optimizer's configuration names.
    """

    def __init__(
        self,
        model: Any,
        collective: Collective,
        stored: Path | None = None,
        custom_objects: Mapping[str, Any] | None = None,
    ) -> None:
        self._model, self._collective = model, collective
        self._custom_objects = dict(custom_objects or {})
        # Callbacks may freeze layers later.
        self._variables = variables = list(model.trainable_variables)
        shapes = tuple(tuple(v.shape) for v in variables)
        sizes = [int(np.prod(shape, dtype=np.int64)) for shape in shapes]
        owners = assign_owners(sizes, collective.world_size)
        self.parts = Parts(shapes, tuple(owners))
        self.owners = {id(v): owner for v, owner in zip(variables, owners, strict=True)}
        self.own = [v for v in variables if self.owns(v)]
        """The trainable variables that this rank updates."""
        self.others = [v for v in variables if not self.owns(v)]
        if model.optimizer.built:
            raise InputError(
                "`shard_optimizer` needs a new optimizer, because this model is not sent to the "
                "workers as a Keras file: compile the model again, or omit `shard_optimizer`"
            )
        model.optimizer.build(self.own)
        # A callback that sets a schedule removes the learning rate from the optimizer's variables.
        self.slots = self._agree()
        """The state for all variables, in Keras's order."""
        if stored is not None:
            self._restore(stored)

    def owns(self, variable: Any) -> bool:
        return self.owners[id(variable)] == self._collective.rank

    @property
    def common(self) -> list[Any]:
        """State that all ranks have, such as a step count and the learning rate."""
        return [one.variable for one in self.slots if one.holder is None]

    def describe(self) -> str:
        """Return a sentence about the size of the parts."""
        sizes = [0] * self._collective.world_size
        for one in self.slots:
            for rank in range(len(sizes)) if one.holder is None else [one.holder]:
                sizes[rank] += one.nbytes
        return (
            f"shard_optimizer: the optimizer's state takes at most {show_bytes(max(sizes))} on a "
            f"worker, instead of {show_bytes(self.count_bytes())}"
        )

    def count_bytes(self) -> int:
        """Return the size of the whole state."""
        return sum(one.nbytes for one in self.slots)

    def gather(self) -> Iterator[Any]:
        """Yield the values of `slots` one by one: on rank 0, those of all ranks; elsewhere, None.

        All ranks must iterate to the end together.
        """
        rank = self._collective.rank
        for one in self.slots:
            if not one.holder:
                yield np.array(one.variable.numpy()) if rank == 0 else None
                continue
            own = np.empty(0, np.uint8)
            if rank == one.holder:
                own = np.array(one.variable.numpy(), order="C").reshape(-1).view(np.uint8)
            parts = self._collective.gather(own)
            yield None if rank else parts[one.holder].view(np.dtype(one.dtype)).reshape(one.shape)

    def restore_whole(self) -> None:
        """Give rank 0's model an optimizer with the whole state; all ranks call it together."""
        values = self.gather()
        if self._collective.rank:
            for _ in values:
                pass
            return
        with tf.device("CPU:0"):  # a GPU may have no room for the state of all
            whole = self._copy(self._model.optimizer)
            whole.build(self._variables)
            targets = self._match(whole.variables)
            for target, value in zip(targets, values, strict=True):
                if target is not None:
                    target.assign(value)
        self._model.optimizer = whole

    def _match(self, variables: Sequence[Any]) -> list[Any]:
        """Return the variable of a whole optimizer for each of `slots`; None if it has none."""
        if len(variables) == len(self.slots):
            return list(variables)
        common = {one.name for one in self.common}
        shared = {one.name: one for one in variables if one.name in common}
        rest = (one for one in variables if one.name not in common)
        own = self.slots
        return [shared.get(x.variable.name) if x.holder is None else next(rest) for x in own]

    def _copy(self, optimizer: Any) -> Any:
        try:
            with keras.saving.custom_object_scope(self._custom_objects):
                return type(optimizer).from_config(optimizer.get_config())
        except Exception as error:  # runs code of the optimizer's class
            raise InputError(
                "`shard_optimizer` needs an optimizer that its get_config() describes, but "
                f"{type(optimizer).__name__} raises {type(error).__name__}: {error}. Omit "
                "`shard_optimizer`"
            ) from error

    def _restore(self, path: Path) -> None:
        """Read this rank's part of the state; a new optimizer's file has none."""
        with open_optimizer_state(path) as datasets:
            if len(datasets) != len(self.slots):
                return
            for one, dataset in zip(self.slots, datasets, strict=True):
                if one.variable is not None:
                    value = dataset[()]
                    is_raw = value.dtype.kind == "V"  # HDF5 has no bfloat16
                    one.variable.assign(value.view(one.variable.dtype) if is_raw else value)

    def _agree(self) -> list[Slot]:
        """Return the whole state in Keras's order; raise `InputError` if parts have another."""
        optimizer, ranks = self._model.optimizer, self._collective.world_size
        variables = dict(enumerate(self._variables))
        own_variables = {n: v for n, v in variables.items() if self.owns(v)}
        copies = self._copy(optimizer), self._copy(optimizer)
        indices = {key: n for n, (key, _) in enumerate(list_state(copies[0], own_variables))}
        whole = list_state(copies[1], variables)
        own = [(str(v.dtype), list(v.shape)) for v in optimizer.variables]
        described = [own[indices[key]] if key in indices else None for key, _ in whole]
        # The whole state may have another type: that of the first variable, which is elsewhere.
        is_same = len(own) == len(indices) == sum(one is not None for one in described) and all(
            one is None or one[0] == dtype for one, (_, dtype) in zip(described, whole, strict=True)
        )
        everyone = all_gather_values(self._collective, [is_same, described])
        slots = []
        for number, ((variable, k), _) in enumerate(whole):
            found = [rank for rank, (_, specs) in enumerate(everyone) if specs[number] is not None]
            holder = None if variable is None else self.parts.owners[variable]
            is_same = is_same and found == (list(range(ranks)) if holder is None else [holder])
            dtype, shape = everyone[found[0]][1][number] if found else ("float32", [0])
            held = optimizer.variables[indices[variable, k]] if (variable, k) in indices else None
            slots.append(Slot(held, holder, dtype, tuple(shape)))
        if not (is_same and all(same for same, _ in everyone)):
            raise InputError(
                f"`shard_optimizer` does not support the optimizer {type(optimizer).__name__} for "
                "this model: it creates other variables for some of the weights than for all. Omit "
                "`shard_optimizer`"
            )
        return slots


State = tuple[int | None, int]
"""Position of a variable among all trainable ones, and the number of its state; or None for state
that belongs to no variable, such as a step count, and its number."""


def list_state(copy: Any, variables: Mapping[int, Any]) -> list[tuple[State, str]]:
    """Return the state of an optimizer that is built for some variables, and its types.

    The optimizer ``copy`` is not built yet: it is built for stand-ins of the trainable variables,
    which are given by their position.
    """
    copy.build([_make_stand_in(variable, number) for number, variable in variables.items()])
    counts: Counter[int | None] = Counter()
    found = []
    for one in copy.variables:
        tag = _TAG.search(one.name)
        number = int(tag[1]) if tag else None
        found.append(((number, counts[number]), str(one.dtype)))
        counts[number] += 1
    return found


def _make_stand_in(variable: Any, number: int) -> Any:
    """Return a variable with one element and as many dimensions, and its position in its name.

    Keras names an optimizer's state after its variable, and chooses it by the path, the type and
    the number of dimensions.
    """
    *scopes, name = variable.path.split("/")
    with ExitStack() as stack:
        for scope in scopes:
            stack.enter_context(keras.name_scope(scope))
        zero = np.zeros([1] * len(variable.shape))
        return keras.Variable(zero, dtype=variable.dtype, name=f"{name}_tfdist{number}")


class WeightGather(Protocol):
    """Sender of the new weights: a `HostExchange`."""

    is_due: bool

    def gather_weights(self, dtype: Any) -> Callable[..., list[Any]]: ...


Tensors = Sequence[Any]


class ShardedUpdate:
    """Update of a model in a step: of this rank's weights, which the other ranks then get.

    ``add_up`` returns the sums of some numbers over all ranks; the gradients of ``micro_steps``
    steps are exchanged as one sum.
    """

    def __init__(
        self,
        model: Any,
        shards: Shards,
        host: WeightGather,
        calls: StepCalls,
        add_up: Callable[[Any], Any],
        micro_steps: int,
    ) -> None:
        self.shards, self._model = shards, model
        self._host, self._calls, self._add_up = host, calls, add_up
        # Keras also applies constraints and averages where it only accumulates gradients.
        optimizer = model.optimizer
        overwrites = optimizer.use_ema and optimizer.ema_overwrite_frequency
        is_constrained = any(v.constraint is not None for v in model.trainable_variables)
        self.sends_always = micro_steps == 1 or bool(overwrites) or is_constrained
        """True if every step may change weights, also if it only accumulates gradients."""

    @contextmanager
    def install(self) -> Iterator[None]:
        """Let the optimizer end a training as for all variables, while the context is active."""
        optimizer = self._model.optimizer
        finalize = optimizer.finalize_variable_values

        def finalize_own(variables: Any) -> None:
            if optimizer.use_ema:
                finalize([v for v in variables if self.shards.owns(v)])
                self._calls.begin(tf.constant(0))
                self._send_weights(is_always=True)

        with (
            override(optimizer, "finalize_variable_values", finalize_own),
            # Files that callbacks write have no state instead of a part of it.
            override(optimizer, "save_own_variables", lambda store: None),
        ):
            yield

    def apply(
        self, apply: Callable[..., Any], means: Tensors, present: Sequence[bool], variables: Tensors
    ) -> None:
        """Update the weights of all ranks with the optimizer's own method ``apply``.

        ``means`` are the mean gradients of this rank's weights; any for the others. ``present``
        shows whether each variable has a gradient.
        """
        pairs = zip(means, variables, strict=True)
        own = [mean if self.shards.owns(v) else None for mean, v in pairs]
        types = {v.dtype for v, is_present in zip(variables, present, strict=True) if is_present}
        self._apply(apply, own, variables, lambda: self._sum_squares(own, present, types))
        self._send_weights()

    def apply_alone(self, apply: Callable[..., Any], gradients: Any, variables: Any) -> None:
        """Update only this rank's weights, given the gradients of all weights."""
        found = [gradient for gradient in gradients if gradient is not None]
        self._apply(apply, gradients, variables, lambda: keras.ops.stack([*map(_square, found)]))

    def _apply(
        self, apply: Callable[..., Any], gradients: Tensors, variables: Tensors, square: Any
    ) -> None:
        """Update this rank's weights; ``square`` returns the squares of all gradients."""
        optimizer = self._model.optimizer
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if self.shards.owns(v)]
        own = [gradient for gradient, _ in pairs]
        if all(gradient is None for gradient in own):
            raise InputError(
                "`shard_optimizer` needs a gradient for some of the weights of each worker, but "
                f"there is none for {', '.join(v.path for _, v in pairs)}: omit `shard_optimizer`"
            )
        limit = optimizer.global_clipnorm
        if limit:
            scale = _compute_scale(square(), limit)
            own = [None if one is None else one * tf.cast(scale, one.dtype) for one in own]
        with override(optimizer, "global_clipnorm", None):
            apply(own, [v for _, v in pairs])

    def _sum_squares(
        self, gradients: Sequence[Any], present: Sequence[bool], types: Collection[str]
    ) -> Any:
        """Return the sum of squares of each gradient, in the order and type of one process."""
        wide = tf.float64 if "float64" in types else tf.float32
        squares = [
            tf.zeros([], wide) if gradient is None else tf.cast(_square(gradient), wide)
            for gradient, is_present in zip(gradients, present, strict=True)
            if is_present
        ]
        # Each rank has zeros for the others, so no sum is rounded.
        (total,) = self._calls.call(
            lambda values: self._add_up(values).astype(values.dtype),
            [tf.stack(squares)],
            [tf.TensorSpec([len(squares)], wide)],
        )
        return tf.cast(total, next(iter(types)) if len(types) == 1 else wide)

    def _send_weights(self, is_always: bool = False) -> None:
        own, others = self.shards.own, self.shards.others
        wide = tf.float64 if any(v.dtype == "float64" for v in [*own, *others]) else tf.float32
        gather = self._host.gather_weights(wide)

        def send() -> Any:
            weights = [tf.cast(tf.convert_to_tensor(v), wide) for v in own]
            values = call_host(gather, weights, [wide] * len(others))
            for variable, value in zip(others, values, strict=True):
                _write(variable, value)
            with tf.control_dependencies(values):
                return tf.constant(True)

        with self._calls.next():
            if is_always or self.sends_always:
                sent = send()
            else:
                is_due = tf.numpy_function(lambda: np.bool_(self._host.is_due), [], tf.bool)
                sent = tf.cond(tf.ensure_shape(is_due, []), send, lambda: tf.constant(False))
        self._calls.end([sent])


def _square(gradient: Any) -> Any:
    return keras.ops.sum(keras.ops.square(gradient))


def _compute_scale(squares: Any, limit: float) -> Any:
    """Return Keras's factor for a global norm: NaN if the norm is not finite."""
    norm = keras.ops.sqrt(keras.ops.sum(squares))
    return limit * keras.ops.minimum(1.0 / norm, 1.0 / limit) + (norm - norm)


def _write(variable: Any, value: Any) -> None:
    """Assign a copy: the variable would retain the whole buffer instead.

    Writing into the variable's memory would make TensorFlow copy it at every later read.
    """
    value = tf.cast(tf.ensure_shape(value, variable.shape), variable.dtype)
    variable.assign(tf.raw_ops.DeepCopy(x=value))
