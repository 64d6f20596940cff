"""Changes to a model's step while it trains or is evaluated together with other workers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import keras
import tensorflow as tf

from pybackend.core.errors import InputError
from pybackend.core.model.view import ModelView
from pybackend.core.words import setting

_ABSENT = object()
Kinds = list[str | None]
"""Per gradient ``"dense"``, ``"sparse"``, or None without a gradient."""


@contextmanager
def override(holder: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of one object, never of its class, so that saved models do not have it."""
    # An instance cannot delete a property of its class, such as Keras's `jit_compile`.
    is_property = isinstance(getattr(type(holder), name, None), property)
    before = getattr(holder, name) if is_property else vars(holder).get(name, _ABSENT)
    setattr(holder, name, value)
    try:
        yield
    finally:
        if before is _ABSENT:
            delattr(holder, name)
        else:
            setattr(holder, name, before)


@contextmanager
def configure(
    read: Callable[[], Any], write: Callable[[Any], object], value: Any
) -> Iterator[None]:
    """Write a setting of this process, given the function that reads it."""
    before = read()
    write(value)
    try:
        yield
    finally:
        write(before)


@contextmanager
def override_each(
    holders: Iterable[Any], name: str, wrap: Callable[[Any, Any], Any]
) -> Iterator[None]:
    """Override an attribute with the result of ``wrap(holder, value before)``."""
    with ExitStack() as stack:
        for holder in holders:
            stack.enter_context(override(holder, name, wrap(holder, getattr(holder, name))))
        yield


def count_rows(data: Any) -> Any:
    """Return a batch's number of rows as a scalar int32 tensor; counts labels if there are any."""
    x, y, _ = keras.utils.unpack_x_y_sample_weight(data)
    return tf.shape(tf.nest.flatten(x if y is None else y)[0])[0]


def count_accumulated_steps(optimizer: Any) -> int:
    """Return the number of steps whose gradients may be exchanged as one sum.

    This is 1 if the optimizer inspects each step's gradients: a loss-scaling optimizer skips those
    that are not finite.
    """
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)


def call_host(fn: Callable[..., Any], inputs: Sequence[Any], types: Sequence[Any]) -> list[Any]:
    """Return the results of a function of arrays, which is called in each step."""
    results = tf.numpy_function(fn, inputs, types)
    # Outside of graphs, TensorFlow returns a single result without its list.
    return list(results) if isinstance(results, list | tuple) else [results]


class RemembersErrors:
    """Object whose methods TensorFlow calls: of an exception, it passes on only the text."""

    error: BaseException | None = None
    """Original exception of the first call that failed, or None."""

    @contextmanager
    def remembering(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            # Later ones are consequences: on a closed connection, every call fails.
            self.error = self.error or error
            raise


class EpochSteps(Protocol):
    """Steps of the current epoch: `RowBatches` or `PipelineBatches`."""

    steps: int
    taken: int
    total_rows: Any
    is_uneven: bool

    @property
    def find_order(self) -> Callable[[int], Any] | None: ...


class Position:
    """Current step of the epoch; the same on every worker.

    It is counted on the host, so that a step knows the other workers' rows without communication.
    """

    def __init__(self, batches: EpochSteps) -> None:
        self.batches = batches
        self.step = 0

    def begin_epoch(self) -> None:
        """Return to the first step that these workers take in the epoch."""
        self.step = self.batches.taken

    def advance(self) -> None:
        self.step += 1

    @property
    def total_rows(self) -> int | None:
        """Number of rows in the global batch of this step; None if no worker knows."""
        total, last = self.batches.total_rows, self.batches.steps - 1
        # A train_step that exchanges twice passes the end before the epoch ends.
        return None if total is None else int(total[min(self.step, last)])


class StepCalls(RemembersErrors):
    """Chain of the collective calls in the step being traced, and what replaces them without rows.

    TensorFlow does not order calls to the host, and every worker must make its calls in the same
    order. Each call increments a counter, which the next call waits for, even across steps.
    """

    def __init__(self) -> None:
        with tf.device("CPU:0"):
            self._turn = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._exchanges = 0
        self.rows: Any = None
        """Rows of the local batch: a scalar tensor."""
        self._last: list[Any] = []
        self._replacements: list[Callable[[], object]] = []

    def begin(self, rows: Any) -> None:
        """Discard the calls of the previous step, and of the previous branch of a graph."""
        self.rows, self._replacements, self._exchanges = rows, [], 0
        self._last = [] if tf.executing_eagerly() else [self._turn.read_value()]

    @contextmanager
    def next(self) -> Iterator[None]:
        """Order the operations created within this context after the previous call."""
        known = _list_graphs()
        if not all(tensor.graph in known for tensor in self._last):
            raise InputError(
                "the workers exchange values inside a loop or a tf.function of the model itself, "
                "so the order of their exchanges is unknown: remove the tf.function, and move "
                f"layers with {setting(synchronized=True)} out of loops"
            )
        with tf.control_dependencies(self._last):
            yield

    def end(self, results: Sequence[Any]) -> None:
        """Record the results of the call that was just made."""
        if not tf.executing_eagerly():
            with tf.control_dependencies(results[:1]):
                self._last = [self._turn.assign_add(1, read_value=False)]

    def call(
        self, fn: Callable[..., Any], inputs: Sequence[Any], results: Sequence[tf.TensorSpec]
    ) -> list[Any]:
        """Return the results of a function of arrays, which each step calls after its other calls.

        ``results`` has their types and shapes.
        """

        def remember(*arrays: Any) -> Any:
            with self.remembering():
                return fn(*arrays)

        with self.next():
            found = call_host(remember, inputs, [spec.dtype for spec in results])
        self.end(found)
        for tensor, spec in zip(found, results, strict=True):
            tensor.set_shape(spec.shape)
        return found

    def count_exchange(self) -> int:
        """Return the number of the gradient exchange that is starting, from 0 in each step."""
        self._exchanges += 1
        return self._exchanges - 1

    def record(self, replacement: Callable[[], object]) -> None:
        """Record what a worker without rows does instead of the call that was just made."""
        self._replacements.append(replacement)

    def replace(self, default: Callable[[], object]) -> None:
        """Take part in the calls of a step without rows.

        ``default`` is used if this worker has not yet taken a step with rows.
        """
        replacements = list(self._replacements)
        self.begin(tf.constant(0))
        for replacement in replacements or [default]:
            replacement()
        self._replacements = replacements


class WhileTracing(StepCalls):
    """All that changes while TensorFlow traces a step with gradients.

    A step that was traced once runs without Python: whatever must differ from step to step belongs
    into a tensor or a variable, not in here. Outside graphs, each step sets it again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.share: Any = None
        """This worker's share of the loss, of which its gradients are; None: of the mean loss."""
        self.kinds: Kinds = []
        """Forms of the gradients in the last exchange, for steps without rows."""
        self.postponed: list[Callable[[], Any]] = []
        """Exchanges that wait until the step has updated its metrics."""
        # Variables whose sparse gradients have the same indices on all workers, e.g. positions.
        self._shared: set[int] = set()
        self._knows_shared = False

    def begin(self, rows: Any) -> None:
        super().begin(rows)
        # If the number of rows is unknown, a known number of indices cannot come from the rows.
        self._knows_shared = tf.get_static_value(rows) is None

    def is_shared(self, gradient: Any, variable: Any) -> bool:
        """Return whether a sparse gradient has the same indices on all workers."""
        if self._knows_shared and gradient.indices.shape[0] is not None:
            self._shared.add(id(variable))
        return id(variable) in self._shared

    def undo_share(self, gradient: Any) -> Any:
        """Return the gradient of a worker's mean loss, given that of its share of the loss."""
        if self.share is None:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            values = self.undo_share(gradient.values)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return tf.math.divide_no_nan(gradient, tf.cast(self.share, gradient.dtype))


def _list_graphs() -> list[Any]:
    """Return the graph being traced and its enclosing graphs."""
    graphs = [tf.compat.v1.get_default_graph()]
    while (outer := getattr(graphs[-1], "outer_graph", None)) is not None:
        graphs.append(outer)
    return graphs


class StepOrSkip:
    """Step that runs if the local batch has rows; ``skip`` runs if it does not.

    The logs have the same structure in both cases: without rows, they hold the current metrics, and
    zeros for other values that a custom train_step logs.
    """

    def __init__(self, model: Any, step: Callable[[Any], Any], skip: Callable[[], None]) -> None:
        self._model, self._step, self._skip = model, step, skip
        self._logged: dict[str, Any] = {}

    def __call__(self, data: Any) -> Any:
        rows = count_rows(data)
        if tf.executing_eagerly():
            return self._take_step(data) if rows > 0 else self._skip_step()
        # The branch with rows is traced first: it determines the logs of the other one.
        return tf.cond(rows > 0, lambda: self._take_step(data), self._skip_step)

    def _take_step(self, data: Any) -> Any:
        logs = tf.nest.map_structure(tf.convert_to_tensor, dict(self._step(data)))
        self._logged = tf.nest.map_structure(lambda value: (value.shape, value.dtype), logs)
        return logs

    def _skip_step(self) -> Any:
        self._skip()
        metrics = self._model.get_metrics_result()
        if tf.executing_eagerly():
            return metrics
        return {
            name: tf.cast(metrics[name], logged[1]) if name in metrics else tf.zeros(*logged)
            for name, logged in self._logged.items()
        }


def normalize_spectra(model: Any) -> None:
    """Update weights as a forward pass on any rows would: only in `SpectralNormalization`."""
    for layer in ModelView(model).layers:  # the step being traced may have created some
        if isinstance(layer, keras.layers.SpectralNormalization):
            vector, kernel = keras.ops.cond(
                keras.ops.all(keras.ops.equal(layer.kernel, 0)),
                lambda layer=layer: (layer.vector_u.value, layer.kernel.value),
                layer.normalized_weights,
            )
            layer.vector_u.assign(vector)
            layer.kernel.assign(kernel)


class StepExchange(Protocol):
    """Exchange between the two compiled parts of a `SplitStep`, such as a `GradientExchange`."""

    def begin_step(self, rows: Any) -> Any: ...
    def weigh_means(self, share: Any) -> AbstractContextManager[None]: ...
    def make_zeros(self) -> list[Any]: ...
    def weigh_step(self, rows: Any) -> tuple[Any, Any]: ...
    def average(self, gradients: list[Any], weight: Any, loss: Any) -> list[Any]: ...


class SplitStep:
    """Replacement for the ``train_step`` of a model compiled with ``jit_compile=True``.

    XLA cannot compile a call to the host, so the exchange runs between two compiled functions.

    Only for Keras's own train_step, which ends with ``optimizer.apply``: any operations after that
    call would run before it here.
    """

    def __init__(self, model: Any, exchange: StepExchange) -> None:
        self._model, self._exchange = model, exchange
        self._train_step, self._apply = model.train_step, model.optimizer.apply
        compute = self._compute_gradients
        self._compute = tf.function(compute, jit_compile=True, reduce_retracing=True)
        self._update = tf.function(self._apply_means, jit_compile=True)
        self._present: list[bool] = []
        self.step = StepOrSkip(model, self._take_step, self._skip_step)
        """The replacement."""

    def _take_step(self, data: Any) -> Any:
        share = self._exchange.begin_step(count_rows(data))
        gradients, weight, loss, logs = self._compute(data, share)
        self._finish(gradients, weight, loss)
        return logs

    def _skip_step(self) -> None:
        normalize_spectra(self._model)
        gradients = [g for g in self._exchange.make_zeros() if g is not None]
        self._exchange.begin_step(tf.constant(0))
        self._finish(gradients, 0.0, 0.0)

    def _finish(self, gradients: list[Any], weight: Any, loss: Any) -> None:
        # A compiled function cannot return None: absent gradients are left out, and added here.
        remaining = iter(gradients)
        listed = [next(remaining) if present else None for present in self._present]
        means = self._exchange.average(listed, weight, loss)
        self._update([mean for mean in means if mean is not None])

    def _compute_gradients(self, data: Any, share: Any) -> Any:
        """Return the gradients that train_step would apply, and its logs."""
        caught: list[Any] = []

        def catch(gradients: Any, trainable_variables: Any = None) -> None:
            caught.extend(gradients)

        with override(self._model.optimizer, "apply", catch), self._exchange.weigh_means(share):
            logs = self._train_step(data)
        self._present = [gradient is not None for gradient in caught]
        weight, loss = self._exchange.weigh_step(count_rows(data))
        return [gradient for gradient in caught if gradient is not None], weight, loss, logs

    def _apply_means(self, means: list[Any]) -> None:
        variables = self._model.trainable_variables
        self._apply(means, [v for v, is_in in zip(variables, self._present, strict=True) if is_in])
