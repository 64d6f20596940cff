"""Average the gradients of all workers inside the optimizer.

Each worker's mean gradient is weighted by the rows it was computed from; their number is sent in
the same buffer, and the sum is divided by the total. This gives the mean gradient over the global
batch, however it is split. Clipping, weight decay and momenta act after it, inside the optimizer,
as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.core.collective import Collective, all_sum
from pybackend.core.engine.calls import StepCalls
from pybackend.core.engine.graph import GraphExchange
from pybackend.core.engine.host import Exchanged, HostExchange, TransferSettings
from pybackend.core.engine.overrides import disable_jit, override, override_each
from pybackend.core.engine.pipeline_feed import count_rows
from pybackend.core.engine.shards import ShardedUpdate, Shards
from pybackend.core.engine.split import SplitStep
from pybackend.core.engine.statistics.global_batch import (
    NOTHING,
    GatheredRows,
    GlobalBatch,
    OverBatch,
)
from pybackend.core.engine.statistics.metrics import StepMeans, ValidStepCounter
from pybackend.core.engine.statistics.normalization import GlobalStatistics
from pybackend.core.engine.step_clock import Arrivals, StepClock
from pybackend.core.engine.step_record import StepRecord
from pybackend.core.engine.steps import (
    Position,
    StepOrSkip,
    count_accumulated_steps,
    normalize_spectra,
)
from pybackend.core.errors import InputError
from pybackend.core.model.view import ModelView, has_own

Kinds = list[str | None]
"""Per gradient ``"dense"``, ``"sparse"``, or None without a gradient."""


class GradientExchange:
    """Gradient exchange of one compiled model for the duration of a ``fit``.

    The new ``apply`` is set on each optimizer *instance*, not on its class, so saved models do not
    contain it.

    Parameters
    ----------
    position
        Position of the current step in its epoch, which every step advances.
    may_be_empty
        True if local batches may have no rows: a step without rows skips the model and adds zeros
        to the sum.
    graph
        True to exchange with TensorFlow's collectives, without compression, in every step.
    over
        The values that are computed from the rows of the global batch.
    clock
        Records how long exchanges delay the steps.
    shards
        Parts of the optimizer's state; None: each worker has the whole state.
    record
        Record of the last exchanged step, for Keras's own train_step; None: there is none.

    Attributes
    ----------
    plain_step
        The model's own ``train_step``, while the exchange is installed.
    is_repeatable
        True if the workers can repeat a step outside the traced function.
    is_compressed
        True if exchanged values are rounded, except in a repeated step.
    is_split
        True if XLA compiles the parts before and after the exchange, but not the exchange.
    """

    is_exact = True

    def __init__(
        self,
        view: ModelView,
        collective: Collective,
        position: Position,
        settings: TransferSettings,
        may_be_empty: bool,
        graph: GraphExchange | None = None,
        over: OverBatch = NOTHING,
        clock: StepClock | None = None,
        shards: Shards | None = None,
        record: StepRecord | None = None,
    ) -> None:
        self._view = view
        self._model = model = view.model
        trains_as_keras = not has_own(model, "train_step")
        self.record = record
        # Exchanges of the step being traced that wait until its metrics are updated.
        self._postponed: list[Callable[[], Any]] = []
        clock = clock or StepClock(Arrivals())
        watched = clock.watch(collective)
        self._may_be_empty = may_be_empty
        self._calls = StepCalls()
        self._statistics = GlobalStatistics(
            view.synchronized, watched, self._calls, self._weigh_gradients
        )
        self._gathered = GatheredRows(watched, self._calls, position.find_order)
        self._global_batch = GlobalBatch(model, self._gathered, self._calls, over)
        self._collective = watched
        # Position of the steps that have begun; a step may exchange several times.
        self._begun = copy(position)
        self._is_paused = False
        self.plain_step: Callable[[Any], Any] = model.train_step
        self._error: BaseException | None = None
        self._means = StepMeans(model, self._calls, self._count_rows, self._sum)
        is_masked = view.has_masked_loss and not over.loss
        # In half precision a worker's gradients must be as large as those of one process, so that
        # they overflow in the same cases.
        is_scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        self._shares_loss = is_scaled and trains_as_keras and not is_masked
        self._half = view.half_variables if self._shares_loss else set()
        self._means.is_always_asked = self._shares_loss
        self._means.is_uneven = position.is_uneven and trains_as_keras
        self._share: Any = None
        self._valid = ValidStepCounter(model) if is_masked else None
        self._kinds: Kinds = []
        # Variables whose sparse gradients have the same indices on all workers, e.g. positions.
        self._shared: set[int] = set()
        self._knows_shared = False
        # If there are masks, they determine the weights.
        knows_totals = self._valid is None and position.total_rows is not None
        # A custom train_step may call apply any number of times.
        accumulates = knows_totals and graph is None and trains_as_keras
        self._micro_steps = count_accumulated_steps(model.optimizer) if accumulates else 1
        self._graph = graph
        self.over = over
        self.is_repeatable = graph is None  # TensorFlow's collectives need a graph
        self.is_split = bool(model.jit_compile)
        self.is_compressed = settings.compression is not None
        parts = shards.parts if shards else None
        self._host = HostExchange(
            collective, position, settings, self._micro_steps, knows_totals, clock, parts, record
        )
        self.shards = shards
        self._sharded: ShardedUpdate | None = None
        if shards is not None:
            self._sharded = ShardedUpdate(
                model, shards, self._host, self._calls, self._sum, self._micro_steps
            )
        self.agreement: Any = graph.agreement if graph else self._host.agreement

    @contextmanager
    def install(self) -> Iterator[None]:
        """Exchange gradients while the context is active; afterwards the model is restored."""
        model, optimizer = self._model, self._model.optimizer
        train_step, apply = model.train_step, optimizer.apply
        self.plain_step = train_step
        with ExitStack() as stack:
            # The traced function exchanges; the model may be trained without it afterwards, also
            # if a worker was lost.
            stack.callback(model.make_train_function, force=True)
            stack.enter_context(self._global_batch.install())
            stack.enter_context(self._means.install())
            stack.enter_context(self._statistics.install())
            if self._sharded is not None:
                stack.enter_context(self._sharded.install())
            if self._shares_loss:
                shared = self._wrap_scale(optimizer.scale_loss)
                stack.enter_context(override(optimizer, "scale_loss", shared))
            if self._valid is not None:
                watched = self._valid.watch(model.compute_loss)
                stack.enter_context(override(model, "compute_loss", watched))
            if self.is_split:
                stack.enter_context(disable_jit(model))
                step = SplitStep(model, train_step, apply, self)
                stack.enter_context(override(model, "train_step", step))
            else:
                stack.enter_context(self._exchanging())
            # A model that was fitted before has a function that was traced without the exchange.
            model.make_train_function(force=True)
            try:
                yield
            finally:
                self._host.close()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """Make the model's step exchange gradients before it applies them, within this context."""
        model, apply = self._model, self._model.optimizer.apply
        step = self._wrap_step(self.plain_step, apply)
        with (
            override_each(self._view.optimizers, "apply", self._wrap_apply),
            override(model, "train_step", step),
        ):
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Take steps as one process, without an exchange, within this context."""
        self._is_paused = True
        try:
            with override(self, "_half", set()):
                yield
        finally:
            self._is_paused = False

    @contextmanager
    def repeating(self, steps: int) -> Iterator[None]:
        """Let all workers repeat the last steps within this context, outside a graph."""
        begun, gathered, kinds = self._begun.step, self._gathered.step, self._kinds
        self._begun.step -= steps
        self._gathered.step -= steps
        try:
            with (
                self._host.repeating(steps),
                override(self, "_half", set()),  # an audit computes in float32
                self._exchanging() if self.is_split else nullcontext(),
            ):
                yield
        finally:
            self._begun.step, self._gathered.step, self._kinds = begun, gathered, kinds

    def copy_exchanges(self) -> None:
        """Copy the gradients of all exchanges from now on, until `take_exchanges`."""
        self._host.exchanged = []

    def take_exchanges(self) -> list[Exchanged]:
        """Return the copies in the order of the exchanges; none with TensorFlow's collectives."""
        copied, self._host.exchanged = self._host.exchanged, None
        return copied or []

    @property
    def weighs_rows(self) -> bool:
        """True if each worker's gradients are weighted by its number of rows."""
        return self._valid is None and self._micro_steps == 1

    @property
    def adds_up(self) -> bool:
        """True if the gradients of several steps are exchanged as one sum."""
        return self._micro_steps > 1

    def count_calls(self) -> int:
        """Return how many times the optimizer has been called."""
        return _read_calls(self._model.optimizer)

    @property
    def error(self) -> BaseException | None:
        """Original exception of a failed exchange, or None; TensorFlow passes on only its text."""
        return self._error or self._host.error or self._gathered.error or self._statistics.error

    @property
    def shared_variables(self) -> Sequence[Any]:
        """Variables of metrics that are the same on all workers."""
        return self._global_batch.variables

    @property
    def variables_of_others(self) -> Sequence[Any]:
        """Trainable variables that only other workers update."""
        return self._sharded.shards.others if self._sharded else ()

    @property
    def needs_others_in_each_step(self) -> bool:
        """True if each step needs weights that other workers updated in the previous one."""
        return self._sharded is not None and self._sharded.sends_always

    def begin_training(self) -> None:
        """Read the optimizer's call count, which a callback may have restored."""
        self._host.begin_training(_read_calls(self._model.optimizer))

    def begin_epoch(self) -> None:
        """Start counting the epoch's steps."""
        self._begun.begin_epoch()
        self._gathered.step = self._begun.step
        if self.record is not None:
            self.record.begin_epoch()
        self._host.begin_epoch()

    def end_epoch(self) -> None:
        """Do nothing: every step has exchanged its gradients."""

    def read_state(self) -> dict[str, Any]:
        """Return the position in the epoch and the state of the exchange, for a checkpoint."""
        requested = self.agreement.is_requested
        return {
            "step": self._begun.step,
            "gathered": self._gathered.step,
            "requested": requested,
            "host": self._host.read_state(),
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `read_state` returned."""
        self._begun.step = state["step"]
        self._gathered.step = state.get("gathered", state["step"])
        self.agreement.is_requested = state["requested"]
        self._host.restore_state(state["host"])

    @property
    def mean_loss(self) -> float | None:
        """Loss of the epoch, if a row-weighted mean of Keras's local means would be incorrect."""
        return None if self._valid is None else self._host.mean_loss

    def begin_step(self, rows: Any) -> Any:
        """Discard the exchanges of the previous step, and of the previous branch of a graph.

        Returns the argument of `weigh_means`.
        """
        # If the number of rows is unknown, a known number of indices cannot come from the rows.
        self._knows_shared = tf.get_static_value(rows) is None
        self._calls.begin(rows)
        share = self._means.compute_share()
        self._share = share if self._shares_loss else None
        return share

    @contextmanager
    def weigh_means(self, share: Any) -> Iterator[None]:
        """Apply weights to means that have one value per step, within this context.

        It contains the forward pass of a step.
        """
        record = None if self._is_paused else self.record
        with self._means.weigh(share), record.watching() if record else nullcontext():
            yield

    def make_zeros(self, kinds: Kinds | None = None, variables: Any = None) -> list[Any]:
        """Return the gradients of a step without rows, of the same kinds as on other workers."""
        variables = variables or self._model.trainable_variables
        kinds = kinds or self._kinds or ["dense"] * len(variables)
        return [_make_zero(v, kind) for v, kind in zip(variables, kinds, strict=True)]

    def weigh_step(self, rows: Any) -> tuple[Any, Any]:
        """Return the weight of the gradients of the step being traced, and its mean loss."""
        if self._valid is None:
            return tf.cast(rows, tf.float32), tf.constant(0.0)
        return self._valid.weight(rows), self._valid.loss

    def _weigh_gradients(self) -> Any:
        return self.weigh_step(self._calls.rows)[0]

    def average(
        self, gradients: list[Any], weight: Any, loss: Any, variables: Any = None
    ) -> list[Any]:
        """Return the mean gradients over the global batch, which are the same on every worker.

        Parameters
        ----------
        gradients
            Tensors, ``IndexedSlices`` and None.
        variables
            Variables of these gradients; None for all trainable variables.
        weight, loss
            Scalars: this worker's weight in the means, e.g. its number of rows, and its mean loss.

        If the optimizer's state is in parts, the dense means of other workers' variables are None.
        """
        self._kinds = [self._classify(gradient) for gradient in gradients]
        dense = [n for n, kind in enumerate(self._kinds) if kind == "dense"]
        sparse = [n for n, kind in enumerate(self._kinds) if kind == "sparse"]
        if not dense and not sparse:
            return gradients
        variables = list(variables or self._model.trainable_variables)
        # TensorFlow does not know the shape of every gradient, e.g. of a Dense on sequences.
        tensors = [
            tf.ensure_shape(tf.convert_to_tensor(gradients[n]), variables[n].shape) for n in dense
        ]
        # The same type on all workers, even without rows.
        slices = [(tf.cast(gradients[n].indices, tf.int64), gradients[n].values) for n in sparse]
        anchor = min((variables[n] for n in [*dense, *sparse]), key=_count_elements)
        with self._calls.next():  # a step that applies twice exchanges twice
            parts = [part for pair in slices for part in pair]
            shared = [self._is_shared(gradients[n], variables[n]) for n in sparse]
            owners = self._find_owners([variables[n] for n in dense])
            means = self._exchange(tensors, parts, shared, weight, loss, anchor, owners)
        self._calls.end(means)
        return self.place_means(means, gradients, variables)

    def place_means(
        self,
        means: Sequence[Any],
        gradients: Sequence[Any],
        variables: Sequence[Any],
        is_whole: bool = False,
    ) -> list[Any]:
        """Return the means of an exchange in the places, types and forms of the gradients.

        Parameters
        ----------
        is_whole
            True if there are means of all variables, not only of those that this rank needs.
        """
        kinds = [self._classify(gradient) for gradient in gradients]
        dense = [n for n, kind in enumerate(kinds) if kind == "dense"]
        own = dense if is_whole else [n for n in dense if self._needs(variables[n])]
        sparse = [n for n, kind in enumerate(kinds) if kind == "sparse"]
        result: list[Any] = [None] * len(gradients)
        for n, mean in zip(own, map(tf.convert_to_tensor, means), strict=False):
            mean.set_shape(variables[n].shape)
            # One process adds up in half precision, and overflows there.
            is_half = self._shares_loss and id(variables[n]) in self._half
            mean = tf.cast(mean, tf.float16) if is_half else mean
            result[n] = tf.cast(mean, gradients[n].dtype)
        slices = [tf.convert_to_tensor(mean) for mean in means[len(own) :]]
        for n, indices, values in zip(sparse, slices[::2], slices[1::2], strict=True):
            result[n] = _make_slices(indices, values, variables[n].shape)
        return result

    def _needs(self, variable: Any) -> bool:
        return self._sharded is None or self._sharded.shards.owns(variable)

    def _find_owners(self, variables: Sequence[Any]) -> list[int]:
        """Return the rank that updates each variable; nothing if each rank updates all."""
        if self._sharded is None:
            return []
        return [self._sharded.shards.owners[id(variable)] for variable in variables]

    def _is_shared(self, gradient: Any, variable: Any) -> bool:
        if self._knows_shared and gradient.indices.shape[0] is not None:
            self._shared.add(id(variable))
        return id(variable) in self._shared

    def _count_rows(self, rows: int) -> float:
        """Return the number of rows in the current step's global batch; called once per step."""
        total = self._begun.total_rows
        self._begun.advance()
        if total is not None:
            return total
        return float(self._sum([rows])[0])

    def _sum(self, values: list[float]) -> Any:
        try:
            return all_sum(self._collective, values)
        except BaseException as error:
            self._error = self._error or error
            raise

    def _exchange(
        self,
        tensors: list[Any],
        slices: list[Any],
        shared: list[bool],
        weight: Any,
        loss: Any,
        anchor: Any,
        owners: Sequence[int],
    ) -> list[Any]:
        # Half precision cannot represent a sum weighted by rows: it is exchanged as float32.
        wide = tf.float64 if any(t.dtype == tf.float64 for t in tensors) else tf.float32
        dense = [self.undo_share(tf.cast(tensor, wide)) for tensor in tensors]
        slices = [*slices]
        slices[1::2] = map(self.undo_share, slices[1::2])
        weight, loss = tf.cast(weight, wide), tf.cast(loss, wide)
        if self._graph is not None:
            return self._graph.average(dense, weight)
        number = self._calls.count_exchange()
        recorded = self.record.read() if self.record is not None else []
        return self._host.average(
            dense, slices, shared, weight, loss, anchor, number, owners=owners, recorded=recorded
        )

    def undo_share(self, gradient: Any) -> Any:
        """Return the gradient of a worker's mean loss, given that of its share of the loss."""
        if self._share is None:
            return gradient
        if isinstance(gradient, tf.IndexedSlices):
            values = self.undo_share(gradient.values)
            return tf.IndexedSlices(values, gradient.indices, gradient.dense_shape)
        return tf.math.divide_no_nan(gradient, tf.cast(self._share, gradient.dtype))

    def _wrap_scale(self, scale_loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def scaled(loss: Any) -> Any:
            share = self._means.share
            return scale_loss(loss if share is None else loss * tf.cast(share, loss.dtype))

        return scaled

    def _classify(self, gradient: Any) -> str | None:
        if gradient is None:
            return None
        # Gradients that are accumulated, or summed by TensorFlow, are dense.
        adds_up = self._micro_steps > 1 or self._graph is not None
        return "sparse" if isinstance(gradient, tf.IndexedSlices) and not adds_up else "dense"

    def _wrap_step(
        self, train_step: Callable[[Any], Any], apply: Callable[..., Any]
    ) -> Callable[[Any], Any]:
        def counting_train_step(data: Any) -> Any:
            share = self.begin_step(count_rows(data))
            with (
                self._global_batch.active(),
                self.weigh_means(share),
                self._statistics.active(),
            ):
                self._postponed = []
                logs = train_step(data)
                for exchange in self._postponed:
                    exchange()
                return logs

        def first() -> None:
            self._means.compute_share()
            if self._means.is_uneven:
                self._means.compute_weight(0)
            self._apply_zeros(apply, None, None)

        def skip() -> None:
            normalize_spectra(self._model)
            with self._global_batch.active():
                self._calls.replace(first)

        if not self._may_be_empty:
            return counting_train_step
        return StepOrSkip(self._model, counting_train_step, skip)

    def _wrap_apply(self, optimizer: Any, apply: Callable[..., Any]) -> Callable[..., Any]:
        is_models = optimizer is self._model.optimizer

        def averaging_apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            if trainable_variables is None and not is_models:
                raise InputError(
                    "`apply` needs the variables for an optimizer that was not passed to "
                    "compile(): apply(gradients, variables)"
                )
            if self._is_paused and self._sharded is not None:
                every = self._list(trainable_variables)
                return self._sharded.apply_alone(apply, list(grads), every)
            if self._is_paused:
                return apply(grads, trainable_variables)
            variables = None if trainable_variables is None else list(trainable_variables)
            weight, loss = self.weigh_step(self._calls.rows)

            def exchange() -> Any:
                means = self.average(list(grads), weight, loss, variables)
                kinds = self._kinds
                self._calls.record(lambda: self._apply_zeros(apply, kinds, variables))
                return self._apply_means(apply, means, variables)

            if self.record is None:
                return exchange()
            # Keras's train_step only updates the metrics after this, from the same predictions.
            self._postponed.append(exchange)
            return None

        return averaging_apply

    def _apply_zeros(self, apply: Callable[..., Any], kinds: Kinds | None, variables: Any) -> None:
        """Apply zero gradients to the variables of a step with rows, on a worker without rows."""
        zeros = self.make_zeros(kinds, variables)
        share, self._share = self._share, None
        self._apply_means(apply, self.average(zeros, 0.0, 0.0, variables), variables)
        self._share = share

    def _apply_means(self, apply: Callable[..., Any], means: list[Any], variables: Any) -> Any:
        if self._sharded is None and self.record is None:
            return apply(means, variables)
        if self._sharded is None:
            # Else weight decay and step counts would not wait for the exchange.
            first = next((mean for mean in means if mean is not None), None)
            tensors = [getattr(first, "values", first)] if first is not None else []
            with tf.control_dependencies(tensors):
                return apply(means, variables)
        present = [kind is not None for kind in self._kinds]
        return self._sharded.apply(apply, means, present, self._list(variables))

    def _list(self, variables: Any) -> list[Any]:
        return list(self._model.trainable_variables if variables is None else variables)


def _read_calls(optimizer: Any) -> int:
    """Return an optimizer's call count: with accumulation, ``iterations`` only counts updates."""
    return next(int(v.numpy()) for v in optimizer.variables if v.name == "iteration")


def _count_elements(variable: Any) -> int:
    return int(np.prod(variable.shape, dtype=np.int64))


def _make_slices(indices: Any, values: Any, shape: Any) -> Any:
    shape = list(shape)
    indices.set_shape([None])
    values.set_shape([None, *shape[1:]])
    return tf.IndexedSlices(values, indices, tf.constant(shape, tf.int64))


def _make_zero(variable: Any, kind: str | None) -> Any:
    if kind is None:
        return None
    shape, dtype = list(variable.shape), variable.dtype
    if kind == "dense":
        return tf.zeros(shape, dtype)
    rows = tf.zeros([0, *shape[1:]], dtype)
    return tf.IndexedSlices(rows, tf.zeros([0], tf.int64), tf.constant(shape, tf.int64))
