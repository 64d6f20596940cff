"""Rows of the global batch on every worker, for losses and metrics that are not sums over rows.

Outputs, labels and weights are small compared with gradients. Each worker gets those of all
workers, in the order of their ranks, and computes the same loss on the same batch. The gradient
flows only to the worker's own outputs: with n_w of n rows, it is multiplied by n / n_w, so that the
mean over the workers, weighted by their rows, is the gradient of the global batch. Other inputs of
the loss, such as the weights themselves, have the same gradient on all workers, so the mean does
not change it.
"""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from pybackend.core.collective import Collective
from pybackend.core.engine.step_changes import StepCalls, override_each
from pybackend.core.errors import InputError
from pybackend.core.model.view import has_own
from pybackend.core.words import setting, show

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class OverBatch:
    """Values computed from the rows of the global batch; all others are summed over workers."""

    loss: bool = False
    metrics: bool = False


NOTHING = OverBatch()


def check_runs_eagerly(model: Any, begins_empty: bool) -> None:
    """Raise `InputError` if a model runs eagerly and a worker's first step has no rows.

    The worker would not know what the others exchange. In later steps it does what it did in its
    last step with rows.
    """
    if model.run_eagerly and begins_empty:
        raise InputError(
            f"with {setting(run_eagerly=True)} every worker needs rows in its first step, if the "
            "model has its own train_step, or a loss, metrics or statistics of the global batch: "
            "pass more rows, or omit run_eagerly"
        )


@dataclass(eq=False)
class GatheredRows:
    """Rows of the other workers at each step, fetched from TensorFlow's graph.

    ``find_order`` returns, for a step, the order of the batch among the rows listed by rank; None
    if the rows are already in that order.
    """

    collective: Collective
    calls: StepCalls
    find_order: Callable[[int], Array] | None = None
    step: int = 0  # the next one of the epoch

    def __call__(
        self, own: Sequence[Any], is_first: bool
    ) -> tuple[Sequence[Any], Sequence[Any], Any, Sequence[Any] | None]:
        """Return the rows before and after each of the worker's own tensors, and n / n_w.

        The last value is, for each tensor, the order of the batch, or None if the rows are already
        in that order. ``is_first`` is true for the first fetch of the step.
        """
        for tensor in own:
            _check_has_rows(tensor)
        count = len(own)
        rows = [tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype) for tensor in own]
        orders = [tf.TensorSpec([None], tf.int64)] * (0 if self.find_order is None else count)
        results = [*rows, *rows, *orders, tf.TensorSpec([], tf.float64)]
        fetch = partial(self._fetch, is_first)
        found = self.calls.call(fetch, [tf.convert_to_tensor(self.calls.rows), *own], results)
        return found[:count], found[count : 2 * count], found[-1], found[2 * count : -1] or None

    def fetch_whole(self, specs: Sequence[tf.TensorSpec], is_first: bool) -> list[Any]:
        """Return the rows of all workers in order, in a step without rows on this worker."""
        nothing = [np.zeros([0] * spec.shape.rank, spec.dtype.as_numpy_dtype) for spec in specs]

        def fetch() -> list[Any]:
            *parts, _ = self._fetch(is_first, 0, *nothing)
            count = len(specs)
            pairs = zip(parts[:count], parts[count : 2 * count], strict=True)
            whole = [np.concatenate(pair) for pair in pairs]
            orders = parts[2 * count :] or [slice(None)] * count
            return [rows[order] for rows, order in zip(whole, orders, strict=True)]

        return self.calls.call(fetch, [], specs)

    def _fetch(self, is_first: bool, rows: Any, *own: Array) -> list[Any]:
        self.step += is_first
        packed = _pack(int(rows), own) if rows else np.zeros(0, np.uint8)
        received = self.collective.all_gather(packed)
        types = [array.dtype for array in own]
        everyone = {rank: _unpack(x, types) for rank, x in enumerate(received) if len(x)}
        if not everyone:
            raise InputError(
                "no worker has rows for a step: a pipeline must return the same rows in every epoch"
            )
        arrays = {rank: part for rank, (_, part) in everyone.items()}
        _check_shapes(arrays)
        before = [part for rank, part in arrays.items() if rank < self.collective.rank]
        after = [part for rank, part in arrays.items() if rank > self.collective.rank]
        like = next(iter(arrays.values()))
        total = sum(count for count, _ in everyone.values())
        factor = np.float64(total / rows if rows else 0.0)
        lengths = np.sum([[len(a) for a in part] for part in arrays.values()], axis=0)
        return [*_stack(before, like), *_stack(after, like), *self._order(lengths), factor]

    def _order(self, lengths: Sequence[int]) -> list[Array]:
        """Return the order of the batch for arrays of these lengths, if they have all its rows."""
        if self.find_order is None:
            return []
        found = self.find_order(self.step - 1)
        return [found if len(found) == length else np.arange(length) for length in lengths]


class GlobalBatch:
    """Computation of a model's loss, or its metrics, from the rows of all workers.

    This applies only to steps traced while `active` is in effect, not to computations in callbacks.
    The state of metrics that ``over`` names is the same on all workers.
    """

    def __init__(
        self, model: Any, other_rows: GatheredRows, calls: StepCalls, over: OverBatch
    ) -> None:
        self._model, self._other_rows, self._calls, self._over = model, other_rows, calls, over
        self._is_active = False
        # In the step being traced: own tensors, and the corresponding tensors of all workers.
        self._own: list[Any] = []
        self._whole: list[Any] = []

    @property
    def variables(self) -> list[Any]:
        return [variable for metric in self._metrics for variable in metric.variables]

    @property
    def _metrics(self) -> list[Any]:
        return find_compiled_metrics(self._model) if self._over.metrics else []

    @contextmanager
    def install(self) -> Iterator[None]:
        models = [self._model] if self._over.loss else []
        # Keras's ignores `x`.
        rows = slice(0 if has_own(self._model, "compute_loss") else 1, 4)
        with (
            override_each(models, "compute_loss", lambda _, one: self._watch(one, rows, False)),
            override_each(
                self._metrics, "update_state", lambda _, one: self._watch(one, slice(None), True)
            ),
        ):
            yield

    @contextmanager
    def active(self) -> Iterator[None]:
        self._is_active = True
        self._own, self._whole = [], []
        try:
            yield
        finally:
            self._is_active = False
            self._own, self._whole = [], []

    def _watch(
        self, function: Callable[..., Any], which: slice, is_update: bool
    ) -> Callable[..., Any]:
        """Wrap a function of tensors, so that it gets the tensors of the global batch.

        ``which`` are the arguments that have rows. A worker without rows must also call an update.
        """
        own = signature = inspect.signature(function)
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in own.parameters.values()):
            signature = inspect.signature(partial(keras.Model.compute_loss, None))
        names = list(signature.parameters)[which]

        def watched(*args: Any, **options: Any) -> Any:
            if not self._is_active:
                return function(*args, **options)
            bound = signature.bind(*args, **options)
            given = {n: bound.arguments[n] for n in names if bound.arguments.get(n) is not None}
            indices = self._fetch(given)
            bound.arguments.update(_fill(indices, self._whole))
            if is_update:
                self._calls.record(lambda: function(**_fill(indices, self._whole)))
            return function(*bound.args, **bound.kwargs)

        # Keras checks whether there is a parameter `training`.
        watched.__signature__ = own  # type: ignore[attr-defined]
        return watched

    def _fetch(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Fetch the tensors that have not been fetched yet in this step.

        Returns the indices of the whole tensors, in the structure of the arguments.
        """
        new: list[Any] = []

        def number_of(tensor: Any) -> int:
            # By identity: `==` of tensors compares their elements.
            known = [id(one) for one in (*self._own, *new)]
            if id(tensor) not in known:
                new.append(tensor)
            return [*known, id(tensor)].index(id(tensor))

        def index(leaf: Any) -> Any:
            if leaf is None:
                return None
            tensor = tf.convert_to_tensor(leaf)
            mask = _read_mask(leaf)
            return _Indices(number_of(tensor), None if mask is None else number_of(mask))

        indices = {name: keras.tree.map_structure(index, value) for name, value in given.items()}
        if new:
            is_first = not self._own
            before, after, factor, orders = self._other_rows(new, is_first)
            specs = [tf.TensorSpec([None, *t.shape[1:]], t.dtype) for t in new]
            self._calls.record(
                lambda: self._whole.extend(self._other_rows.fetch_whole(specs, is_first))
            )
            self._own += new
            whole = [
                tf.concat([one, _scale_gradient(tensor, factor), other], 0)
                for one, tensor, other in zip(before, new, after, strict=True)
            ]
            self._whole += whole if orders is None else map(tf.gather, whole, orders)
        return indices


def find_compiled_metrics(model: Any) -> list[Any]:
    """Return the metrics passed to ``compile``, which Keras stores in a metric of metrics."""
    return [each for each in model.metrics if hasattr(each, "metrics")]


@dataclass(frozen=True)
class _Indices:
    """Those of a whole tensor, and of its mask, in the lists of a step."""

    tensor: int
    mask: int | None


def _fill(indices: Mapping[str, Any], whole: Sequence[Any]) -> dict[str, Any]:
    def find(one: Any) -> Any:
        if one is None:
            return None
        tensor = whole[one.tensor]
        return tensor if one.mask is None else _Mask(whole[one.mask])(tensor)

    return {name: keras.tree.map_structure(find, value) for name, value in indices.items()}


class _Mask(keras.layers.Layer):
    """Layer that notes the mask of its input, and gives another one to its output."""

    def __init__(self, given: Any = None) -> None:
        super().__init__(autocast=False, name="mask")
        self.supports_masking = True
        self.found, self._given = None, given

    def call(self, inputs: Any, mask: Any = None) -> Any:
        self.found = mask
        return tf.identity(inputs)

    def compute_mask(self, inputs: Any, previous_mask: Any = None) -> Any:
        return self._given


def _read_mask(leaf: Any) -> Any:
    reader = _Mask()
    reader(leaf)
    return reader.found


def _scale_gradient(tensor: Any, factor: Any) -> Any:
    if not tensor.dtype.is_floating:
        return tensor

    def scale(value: Any) -> Any:
        return tf.identity(value), lambda upstream: upstream * tf.cast(factor, upstream.dtype)

    return tf.custom_gradient(scale)(tensor)


def _check_has_rows(tensor: Any) -> None:
    if tensor.dtype == tf.string:
        raise InputError(
            "text cannot be sent between workers in each step: the labels and weights of a loss or "
            "metric over the global batch must be numbers"
        )
    if tensor.shape.rank == 0:
        raise InputError(
            "an output, label or weight is a single number: a loss or metric over the global batch "
            "needs a value for each row"
        )


def _pack(rows: int, arrays: Sequence[Array]) -> Array:
    """Return the number of rows and the arrays as bytes, with their shapes first.

    Not as in `job.values`, because this is done in every step: all workers know the types of the
    arrays, and JSON would take longer than everything else here.
    """
    shapes = [number for array in arrays for number in (array.ndim, *array.shape)]
    parts = [np.array([rows, *shapes], np.int64), *arrays]
    return np.concatenate([np.frombuffer(part.tobytes(), np.uint8) for part in parts])


def _unpack(packed: Array, types: Sequence[Any]) -> tuple[int, list[Array]]:
    content = io.BytesIO(packed.tobytes())

    def read(dtype: Any, shape: Any) -> Array:
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(content.read(size), dtype).reshape(shape)

    rows = int(read(np.int64, ()))
    shapes = [read(np.int64, int(read(np.int64, ()))) for _ in types]
    return rows, [read(dtype, shape) for shape, dtype in zip(shapes, types, strict=True)]


def _check_shapes(everyone: Mapping[int, Sequence[Array]]) -> None:
    first = next(iter(everyone))
    for rank, arrays in everyone.items():
        for one, other in zip(everyone[first], arrays, strict=True):
            if one.shape[1:] != other.shape[1:]:
                raise InputError(
                    f"rows of workers {first} and {rank} have the shapes "
                    f"{show(one.shape[1:])} and {show(other.shape[1:])}: a loss or metric over "
                    "the global batch needs the same shape on all workers, so pad rows to the same "
                    "length"
                )


def _stack(parts: Sequence[Sequence[Array]], like: Sequence[Array]) -> list[Array]:
    """Concatenate the arrays of several workers; if there are none, the result has no rows."""
    return [
        np.concatenate([array[:0], *(part[n] for part in parts)]) for n, array in enumerate(like)
    ]
