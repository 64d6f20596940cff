"""Steps of one process: Keras's own step, on the rows of all workers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from pybackend.core.engine.audit_rows import GlobalRows, UnequalRows
from pybackend.core.engine.overrides import override_each
from pybackend.core.engine.stand_ins import PLACES, running_functions, trace_loops
from pybackend.core.engine.state import find_statistics
from pybackend.core.engine.step_means import find_step_means
from pybackend.core.model.compare import is_random_state
from pybackend.core.model.view import ModelView, is_mixed

Array = npt.NDArray[Any]
# Number of elements of variables that are compared between epochs.
_SMALL = 64
Values = dict[int, Array]
"""Values of variables, by the identity of the variable."""


class StepState:
    """Variables that a training step may change.

    Parameters
    ----------
    others
        Variables in addition to those of the model and its optimizers.
    """

    def __init__(self, view: ModelView, others: Sequence[Any] = ()) -> None:
        self.view = view
        """The model, as it was when `find` was called last."""
        self._model = view.model
        self._others = others
        self.variables: dict[int, Any] = {}
        """TensorFlow's variables by their identity, as `find` returned them."""

    def find(self) -> dict[int, Any]:
        """Find the variables: a step may have created new ones."""
        model, self.view = self._model, self.view.renewed()
        found = [*model.variables, *self.view.optimizer_variables, *model.metrics_variables]
        found += [*self.view.list_variables(), *self._others]
        self.variables = {id(own): own for own in map(as_tensorflow, found)}
        return self.variables

    def name_variables(self) -> dict[int, str]:
        """Return the names of the variables for messages."""
        model = self._model
        names = {
            id(as_tensorflow(value)): f"{part.name}.{name}"
            for part in self.view.parts
            for name, value in vars(part).items()
            if isinstance(value, keras.Variable | tf.Variable)
        }
        names |= {id(v.value): str(v.path) for one in self.view.metrics for v in one.variables}
        names |= {id(v.value): str(v.path) for v in model.metrics_variables}
        for one in self.view.optimizer_variables:
            names[id(one.value)] = f"{one.path} of the optimizer"
        return names | {id(v.value): str(v.path) for v in model.variables}

    def read(self, which: Sequence[int] | None = None) -> Values:
        """Return copies of the values of all variables, or of some."""
        found = self.variables
        chosen = found if which is None else [key for key in which if key in found]
        return {key: np.asarray(found[key].numpy()) for key in chosen}

    def list_metrics(self, shared: Sequence[Any]) -> list[int]:
        """Return the variables of metrics, except those that are the same on all workers."""
        left_out = {id(as_tensorflow(variable)) for variable in shared}
        listed = [id(v.value) for v in self._model.metrics_variables]
        # Keras's own mean of the loss is not among the metrics of a model that lists them itself.
        own = [id(v.value) for one in self.view.metrics for v in one.variables]
        return [key for key in dict.fromkeys([*listed, *own]) if key not in left_out]

    def list_statistics(self) -> list[int]:
        """Return the variables of `find_statistics`."""
        return [id(v.value) for v in find_statistics(self._model)]

    def list_generators(self) -> list[int]:
        """Return the states of random generators."""
        return [id(v.value) for v in self._model.variables if is_random_state(v)]

    def count_bytes(self) -> int:
        """Return the total size in bytes of all variables found so far."""
        return _count_bytes((self.variables or self.find()).values())

    def count_trained_bytes(self) -> int:
        """Return the total size in bytes of the trained weights, and so of their gradients."""
        return _count_bytes(map(as_tensorflow, self._model.trainable_variables))

    def read_small(self) -> Values:
        """Return small variables that losses and layers may use, and that no step trains."""
        model = self._model
        apart = [*model.trainable_variables, *self._others, *self.view.optimizer_variables]
        left_out = {id(as_tensorflow(v)) for v in apart} | set(self.list_metrics(()))
        keys = [key for key, one in self.variables.items() if key not in left_out]
        return self.read([k for k in keys if np.prod(self.variables[k].shape) <= _SMALL])

    def write(self, values: Mapping[int, Array]) -> None:
        """Assign values to the variables."""
        for key, value in values.items():
            if key in self.variables:
                self.variables[key].assign(value)


class OneProcess:
    """Steps of one process, outside a graph.

    Parameters
    ----------
    class_weight
        As in ``fit``.

    Attributes
    ----------
    place
        Constant that replaces random numbers, as in `stand_in_noise`.
    type
        Type in which layers compute, such as "float64"; None: that of each layer.
    """

    def __init__(self, state: StepState, class_weight: Mapping[int, float] | None) -> None:
        self._state = state
        self._class_weight = class_weight
        self._traced: dict[Any, dict[Any, Any]] = {}
        self.place = PLACES[0]
        self.type: str | None = None

    def take(self, step: Callable[[Any], Any], batch: Any) -> None:
        """Take a step on a batch of arrays.

        Parameters
        ----------
        step
            The model's ``train_step``, unchanged or with an exchange.
        """
        view = self._state.view
        data = self._weigh(keras.tree.map_structure(tf.convert_to_tensor, batch))
        traced = self._traced.setdefault((self.place, self.type), {})
        with ExitStack() as stack:
            # A graph traced before would have other rows, and random numbers.
            stack.enter_context(running_functions(eagerly=True))
            stack.enter_context(_multiplying_exactly())
            stack.enter_context(self._average_as_traced())
            stack.enter_context(_without_cudnn(view.layers))
            stack.enter_context(trace_loops(view, traced))
            if self.type is not None:
                stack.enter_context(_computing_in(view.parts, self.type))
            step(data)

    def take_all(
        self,
        step: Callable[[Any], Any],
        steps: Sequence[GlobalRows],
        moved: Sequence[Callable[[], None]],
    ) -> None:
        """Take steps on all workers' rows, normalizing each worker's rows as that worker does.

        Parameters
        ----------
        moved
            Functions to call before each step.
        """
        for rows, before in zip(steps, moved, strict=True):
            before()
            with self._normalize_by_parts(rows):
                self.take(step, rows.batch)

    def _average_as_traced(self) -> AbstractContextManager[None]:
        """Compute the means of one value per step as in a traced step.

        In a traced step, Keras does not know how many rows a batch has, and gives every step the
        weight one. In a step that is not traced, it weights the step by its rows.
        """
        model = self._state.view.model
        means = [] if model.run_eagerly else find_step_means(model)
        return override_each(means, "update_state", _unweighted)

    def _weigh(self, batch: Any) -> Any:
        """Convert class weights to sample weights, as Keras does."""
        if self._class_weight is None or len(batch) != 2:
            return batch
        y = batch[1]
        is_one_hot = len(y.shape) > 1 and y.shape[-1] != 1
        codes = tf.argmax(y, -1) if is_one_hot else tf.cast(tf.round(tf.reshape(y, [-1])), tf.int64)
        weights = [self._class_weight[n] for n in range(len(self._class_weight))]
        return *batch, tf.gather(tf.constant(weights, tf.float32), codes)

    def _normalize_by_parts(self, rows: GlobalRows) -> AbstractContextManager[None]:
        """Normalize each worker's rows separately, in layers that do so in training."""
        view = self._state.view
        spread = {
            id(inner)
            for outer in view.layers
            if isinstance(outer, keras.layers.TimeDistributed)
            for inner in ModelView(outer.layer).parts
        }

        def watch(layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
            return _by_parts(call, rows, id(layer) in spread)

        return override_each(view.unsynchronized, "call", watch)


@contextmanager
def _multiplying_exactly() -> Iterator[None]:
    """Make GPUs use full float32 precision instead of TF32 within this context."""
    settings = tf.config.experimental
    before = settings.tensor_float_32_execution_enabled()
    settings.enable_tensor_float_32_execution(False)
    try:
        yield
    finally:
        settings.enable_tensor_float_32_execution(before)


def _without_cudnn(layers: Sequence[Any]) -> AbstractContextManager[None]:
    """Compute recurrent layers within this context without cuDNN, which is less precise."""
    found = [one for one in layers if isinstance(one, keras.layers.LSTM | keras.layers.GRU)]
    return override_each(found, "use_cudnn", lambda layer, before: False)


@contextmanager
def _computing_in(parts: Sequence[Any], name: str) -> Iterator[None]:
    """Make a model and its layers compute in a more precise type; variables stay."""
    with ExitStack() as stack:
        for part in parts:
            if name == "float32" and not is_mixed(part):
                continue
            # To assign to a layer changes the entries of its map, which cannot be restored.
            if isinstance(part.dtype_policy, keras.dtype_policies.DTypePolicyMap):
                raise TypeError(f"{part.name} has a map of types")
            stack.callback(setattr, part, "dtype_policy", part.dtype_policy)
            part.dtype_policy = _Computing(name)
        yield


class _Computing(keras.DTypePolicy):
    """Computes in one type. Variables stay in float32, and Keras converts them for each layer.

    If both were float64, Keras would convert none, and convolutions failed: no step of such a model
    was known in float64, and a right training ended (test_audit.py, the types of layers).
    """

    variable_dtype = property(lambda self: "float32")


def _unweighted(mean: Any, update: Callable[..., Any]) -> Callable[..., Any]:
    def watched(values: Any, sample_weight: Any = None) -> Any:
        is_known = isinstance(sample_weight, int)
        return update(values, sample_weight=None if is_known else sample_weight)

    return watched


def _by_parts(
    call: Callable[..., Any], rows: GlobalRows, lays_end_to_end: bool
) -> Callable[..., Any]:
    def watched(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        if not training:
            return call(inputs, training=training, mask=mask)
        times, rest = divmod(int(inputs.shape[0]), int(rows.counts.sum()))
        if rest or (times > 1 and not lays_end_to_end):
            raise UnequalRows(
                "a normalization layer is called with rows other than those of the batch"
            )
        # Time steps of a row may have been concatenated.
        places = [
            (part[:, None] * times + np.arange(times)).reshape(-1)
            for part in rows.parts
            if len(part)
        ]
        outputs = [
            call(
                tf.gather(inputs, own),
                training=True,
                mask=None if mask is None else tf.gather(mask, own),
            )
            for own in places
        ]
        return tf.gather(tf.concat(outputs, 0), np.argsort(np.concatenate(places)))

    return watched


Settings = dict[tuple[int, str], Any]


class OwnSettings:
    """Plain attributes of a model, its layers, losses and metrics, which Python code may use."""

    def __init__(self, view: ModelView) -> None:
        parts = [*view.parts, *view.custom_parts]
        self._parts = {id(one): one for one in parts if not inspect.isroutine(one)}

    def read(self) -> Settings:
        """Return the values of the attributes."""
        return {
            (number, name): value
            for number, part in self._parts.items()
            for name, value in getattr(part, "__dict__", {}).items()
            if isinstance(value, bool | int | float | str)
            if not name.startswith(("_", "stop_"))
        }

    def restore(self, saved: Settings) -> str | None:
        """Restore attributes that steps have changed; return the name of the first, or None."""
        changed = self.list_changed(saved)
        for number, name in changed:
            setattr(self._parts[number], name, saved[number, name])
        return self.name(changed)

    def list_changed(self, saved: Settings) -> list[tuple[int, str]]:
        """Return the attributes whose values were others when they were read."""
        return [key for key, value in self.read().items() if saved.get(key, value) != value]

    def name(self, changed: Sequence[tuple[int, str]]) -> str | None:
        """Return the name of the first of some attributes, or None."""
        return next((f"{type(self._parts[n]).__name__}.{name}" for n, name in changed), None)


def _count_bytes(variables: Iterable[Any]) -> int:
    return sum(int(np.prod(v.shape)) * v.dtype.size for v in variables)


def as_tensorflow(variable: Any) -> Any:
    """Return the TensorFlow variable behind a Keras variable."""
    return variable.value if isinstance(variable, keras.Variable) else variable
