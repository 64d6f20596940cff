"""Steps of one process: Keras's own, on the rows of all workers, with the gradients compared."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from pybackend.core.engine.audit.audited_rows import GlobalRows, UnequalRows
from pybackend.core.engine.audit.audited_steps import Values
from pybackend.core.engine.audit.stand_ins import POSITIONS, running_functions, trace_loops
from pybackend.core.engine.equal_state import find_statistics
from pybackend.core.engine.exchange.transports import Exchanged
from pybackend.core.engine.statistics.metrics import find_step_means
from pybackend.core.engine.step_changes import configure, override, override_each
from pybackend.core.model.compare import is_random_state
from pybackend.core.model.view import ModelView, is_mixed

Array = npt.NDArray[Any]
Step = Callable[[Any], Any]
# Number of elements of variables that are compared between epochs.
_SMALL = 64


class StepState:
    """Variables that a training step may change: those of the model, its optimizers, and others."""

    def __init__(self, view: ModelView, others: Sequence[Any] = ()) -> None:
        self.view = view  # the model, as it was when `find` was called last
        self._model, self._others = view.model, others
        self.variables: dict[int, Any] = {}  # TensorFlow's, by their identity

    def find(self) -> dict[int, Any]:
        """Find the variables: a step may have created new ones."""
        model, self.view = self._model, self.view.renewed()
        found = [*model.variables, *self.view.optimizer_variables, *model.metrics_variables]
        found += [*self.view.list_variables(), *self._others]
        self.variables = {id(own): own for own in map(as_tensorflow, found)}
        return self.variables

    def name_variables(self) -> dict[int, str]:
        model = self._model
        names = {
            id(as_tensorflow(value)): f"{part.name}.{name}"
            for part in self.view.parts
            for name, value in vars(part).items()
            if isinstance(value, keras.Variable | tf.Variable)
        }
        optimizers = self.view.optimizer_variables
        metrics = [v for one in self.view.metrics for v in one.variables]
        names |= {id(v.value): str(v.path) for v in [*metrics, *model.metrics_variables]}
        names |= {id(v.value): f"{v.path} of the optimizer" for v in optimizers}
        return names | {id(v.value): str(v.path) for v in model.variables}

    def read(self, which: Iterable[int] | None = None) -> Values:
        """Return copies of the values of all variables, or of some."""
        found = self.variables
        chosen = found if which is None else which
        return {key: np.asarray(found[key].numpy()) for key in chosen if key in found}

    def list_metrics(self, shared: Sequence[Any]) -> list[int]:
        """Return the variables of metrics, except those that are the same on all workers."""
        left_out = {id(as_tensorflow(variable)) for variable in shared}
        listed = [id(v.value) for v in self._model.metrics_variables]
        # Keras's own mean of the loss is not among the metrics of a model that lists them itself.
        own = [id(v.value) for one in self.view.metrics for v in one.variables]
        return [key for key in dict.fromkeys([*listed, *own]) if key not in left_out]

    def list_statistics(self) -> list[int]:
        return [id(v.value) for v in find_statistics(self._model)]

    def list_generators(self) -> list[int]:
        return [id(v.value) for v in self._model.variables if is_random_state(v)]

    def count_bytes(self) -> int:
        return count_bytes((self.variables or self.find()).values())

    def read_small(self) -> Values:
        """Return small variables that losses and layers may use, and that no step trains."""
        model = self._model
        apart = [*model.trainable_variables, *self._others, *self.view.optimizer_variables]
        left_out = {id(as_tensorflow(v)) for v in apart} | set(self.list_metrics(()))
        small = {key for key, one in self.variables.items() if np.prod(one.shape) <= _SMALL}
        return self.read(small - left_out)

    def write(self, values: Mapping[int, Array]) -> None:
        for key, value in values.items():
            if key in self.variables:
                self.variables[key].assign(value)


class OneProcess:
    """Steps of one process, outside a graph, with the ``class_weight`` of ``fit``.

    ``position`` is as in `stand_in_noise`. ``type`` is the type in which layers compute, such as
    "float64"; None: that of each layer.
    """

    def __init__(self, state: StepState, class_weight: Mapping[int, float] | None) -> None:
        self.state, self._class_weight = state, class_weight
        self._traced: dict[Any, dict[Any, Any]] = {}
        self.position = POSITIONS[0]
        self.type: str | None = None

    def take(self, step: Step, batch: Any) -> None:
        """Take a step on a batch of arrays: a ``train_step``, unchanged or with an exchange."""
        view = self.state.view
        data = self._weigh(keras.tree.map_structure(tf.convert_to_tensor, batch))
        traced = self._traced.setdefault((self.position, self.type), {})
        with (
            # A graph traced before would have other rows, and random numbers.
            running_functions(eagerly=True),
            _multiplying_exactly(),
            self._average_as_traced(),
            _without_cudnn(view.layers),
            trace_loops(view, traced),
            _computing_in(view.parts, self.type),
        ):
            step(data)

    def take_all(
        self, step: Step, steps: Sequence[GlobalRows], moved: Sequence[Callable[[], None]]
    ) -> None:
        """Take steps on all workers' rows, normalizing each worker's rows as that worker does.

        The functions in ``moved`` are called before the steps.
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
        model = self.state.view.model
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
        view = self.state.view
        spread = {
            id(inner)
            for outer in view.layers
            if isinstance(outer, keras.layers.TimeDistributed)
            for inner in ModelView(outer.layer).parts
        }

        def watch(layer: Any, call: Callable[..., Any]) -> Callable[..., Any]:
            return _by_parts(call, rows, id(layer) in spread)

        return override_each(view.unsynchronized, "call", watch)


def _multiplying_exactly() -> AbstractContextManager[None]:
    settings = tf.config.experimental
    is_enabled = settings.tensor_float_32_execution_enabled
    return configure(is_enabled, settings.enable_tensor_float_32_execution, False)


def _without_cudnn(layers: Sequence[Any]) -> AbstractContextManager[None]:
    """Compute recurrent layers without cuDNN, which is less precise."""
    found = [one for one in layers if isinstance(one, keras.layers.LSTM | keras.layers.GRU)]
    return override_each(found, "use_cudnn", lambda layer, before: False)


@contextmanager
def _computing_in(parts: Sequence[Any], name: str | None) -> Iterator[None]:
    """Make a model and its layers compute in a more precise type; variables stay."""
    with ExitStack() as stack:
        for part in parts:
            if name is None or (name == "float32" and not is_mixed(part)):
                continue
            # To assign to a layer changes the entries of its map, which cannot be restored.
            if isinstance(part.dtype_policy, keras.dtype_policies.DTypePolicyMap):
                raise TypeError(f"{part.name} has a map of types")
            stack.enter_context(override(part, "dtype_policy", _Computing(name)))
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
        parts = [part for part in rows.parts if len(part)]
        positions = [(part[:, None] * times + np.arange(times)).reshape(-1) for part in parts]
        masks = [None if mask is None else tf.gather(mask, own) for own in positions]
        outputs = [
            call(tf.gather(inputs, own), training=True, mask=one)
            for own, one in zip(positions, masks, strict=True)
        ]
        return tf.gather(tf.concat(outputs, 0), np.argsort(np.concatenate(positions)))

    return watched


Settings = dict[tuple[int, str], Any]


class OwnSettings:
    """Plain attributes of a model, its layers, losses and metrics, which Python code may use."""

    def __init__(self, view: ModelView) -> None:
        parts = [*view.parts, *view.custom_parts]
        self._parts = {id(one): one for one in parts if not inspect.isroutine(one)}

    def read(self) -> Settings:
        return {
            (number, name): value
            for number, part in self._parts.items()
            for name, value in getattr(part, "__dict__", {}).items()
            if isinstance(value, bool | int | float | str)
            if not name.startswith(("_", "stop_"))
        }

    def find_changed(self, saved: Settings, restores: bool = False) -> str | None:
        """Return the name of the first attribute that has changed, or None; restore all."""
        changed = [key for key, value in self.read().items() if saved.get(key, value) != value]
        for number, name in changed if restores else ():
            setattr(self._parts[number], name, saved[number, name])
        return next((f"{type(self._parts[n]).__name__}.{name}" for n, name in changed), None)

    def restore(self, saved: Settings) -> str | None:
        return self.find_changed(saved, restores=True)


def count_bytes(variables: Iterable[Any]) -> int:
    return sum(int(np.prod(v.shape)) * v.dtype.size for v in map(as_tensorflow, variables))


def as_tensorflow(variable: Any) -> Any:
    return variable.value if isinstance(variable, keras.Variable) else variable


class ExchangedMeans(Protocol):
    """Attributes of a `GradientExchange` that compare its gradients with those of a step."""

    adds_up: bool

    def place_means(
        self, means: Sequence[Any], gradients: Sequence[Any], variables: Sequence[Any], whole: bool
    ) -> list[Any]: ...
    def undo_share(self, gradient: Any) -> Any: ...


class WatchedGradients:
    """Compares the gradients of steps with those that were exchanged, which the optimizers apply.

    Without ``exchanged``, they apply the gradients of the steps. If ``is_own``, the steps have this
    worker's rows, and its own gradients are compared.
    """

    def __init__(
        self,
        view: ModelView,
        exchange: ExchangedMeans,
        exchanged: Sequence[Exchanged],
        steps: int,
        is_own: bool = False,
    ) -> None:
        self._view, self._exchange, self._is_own = view, exchange, is_own
        self._remaining, self._each = iter(exchanged), max(1, len(exchanged) // steps)
        self._count = 0
        # What was exchanged and what the steps computed, by the step, the number of the exchange in
        # the step, and the variable's path. Gradients that are exchanged as one sum are summed.
        self.pairs: dict[Any, tuple[Array, Array]] = {}

    def install(self) -> AbstractContextManager[None]:
        return override_each(self._view.optimizers, "apply", self._watch)

    def _watch(self, optimizer: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
        def watched(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            gradients, given = list(grads), trainable_variables
            variables = list(self._view.model.trainable_variables if given is None else given)
            exchanges = any(gradient is not None for gradient in gradients)
            if exchanges and (one := next(self._remaining, None)) is not None:
                gradients = self._replace(one, gradients, variables)
            return apply(gradients, trainable_variables)

        return watched

    def _replace(self, one: Exchanged, gradients: list[Any], variables: Sequence[Any]) -> list[Any]:
        step, number = divmod(self._count, self._each)
        self._count += 1
        place = self._exchange.place_means
        is_whole = len(one.means) == len(one.own)
        means = place(one.means, gradients, variables, is_whole)
        compared = place(one.own, gradients, variables, True) if self._is_own else means
        for variable, value, gradient in zip(variables, compared, gradients, strict=True):
            if value is None:  # another worker has it, or there is none
                continue
            key = (0 if self._exchange.adds_up else step, number, str(variable.path))
            own = self._exchange.undo_share(gradient) if self._is_own else gradient
            pair = _as_arrays(value, own)
            before = self.pairs.get(key)
            self.pairs[key] = pair if before is None else (before[0] + pair[0], before[1] + pair[1])
        pairs = zip(means, gradients, strict=True)
        return [gradient if mean is None else mean for mean, gradient in pairs]


def _as_arrays(mean: Any, gradient: Any) -> tuple[Array, Array]:
    """Return two gradients as arrays; of sparse ones, the rows that either of them has."""
    if not isinstance(mean, tf.IndexedSlices):
        return mean.numpy(), tf.convert_to_tensor(gradient).numpy()
    pair = [(np.array(one.indices), np.array(one.values)) for one in (mean, gradient)]
    rows = np.unique(np.concatenate([indices for indices, _ in pair]))
    one, other = (np.zeros((len(rows), *values.shape[1:]), values.dtype) for _, values in pair)
    for summed, (indices, values) in zip((one, other), pair, strict=True):
        np.add.at(summed, np.searchsorted(rows, indices), values)
    return one, other
