"""Averages the gradients of all workers inside the optimizer.

Each worker's mean gradient is weighted by the rows it was computed from; the rows travel in the
same buffer, and the sum is divided by their total. That is the mean gradient over the global
batch, whatever the split. Clipping, weight decay and momenta act after it, inside the optimizer,
as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from pybackend.collective import Collective, all_sum
from pybackend.engine.arrivals import Arrivals
from pybackend.engine.calls import StepCalls
from pybackend.engine.global_batch import NOTHING, GatheredRows, GlobalBatch, OverBatch
from pybackend.engine.graph import GraphExchange
from pybackend.engine.host import HostExchange, TransferSettings
from pybackend.engine.overrides import disable_jit, override
from pybackend.engine.pipeline_feed import count_rows
from pybackend.engine.split import SplitStep
from pybackend.engine.statistics import GlobalStatistics
from pybackend.engine.step_clock import StepClock
from pybackend.engine.step_means import StepMeans
from pybackend.engine.steps import (
    Position,
    StepOrSkip,
    has_keras_train_step,
    normalize_spectra,
)
from pybackend.engine.valid_steps import ValidStepCounter
from pybackend.errors import InputError
from pybackend.model.layers import find_half_variables, find_optimizers
from pybackend.model.masks import has_masked_loss

Kinds = list[str | None]
"""Per gradient ``"dense"``, ``"sparse"`` or None if there is none."""


class GradientExchange:
    """Couples one compiled model to a collective for the duration of a ``fit``.

    Every optimizer *instance* gets a new ``apply``, not its class, so that saved models know
    nothing of it.

    Parameters
    ----------
    position
        Of this step in its epoch; advanced with every step.
    may_be_empty
        Local batches may have no rows: such a step skips the model and adds nothing to the sum.
    graph
        Exchanges by TensorFlow's collectives instead, without compression; every step exchanges.
    over
        What is computed from the rows of the global batch.
    clock
        Notes for how long exchanges hold up the steps.

    Attributes
    ----------
    plain_step
        The model's own ``train_step``, while the exchange is installed.
    is_repeatable
        Whether the workers can take a step again, outside of the function that was traced.
    is_compressed
        What is exchanged is rounded; if a step is repeated, it is not.
    is_split
        XLA compiles what lies before and after the exchange, but not the exchange.
    """

    is_exact = True

    def __init__(
        self,
        model: Any,
        collective: Collective,
        position: Position,
        settings: TransferSettings,
        may_be_empty: bool,
        graph: GraphExchange | None = None,
        over: OverBatch = NOTHING,
        clock: StepClock | None = None,
    ) -> None:
        self._model = model
        clock = clock or StepClock(Arrivals())
        watched = clock.watch(collective)
        self._may_be_empty = may_be_empty
        self._calls = StepCalls()
        self._statistics = GlobalStatistics(model, watched, self._calls, self._weigh_gradients)
        self._gathered = GatheredRows(watched, self._calls, position.find_order)
        self._global_batch = GlobalBatch(model, self._gathered, self._calls, over)
        self._collective = watched
        # Of the steps that have begun; a step may exchange several times.
        self._begun = copy(position)
        self._is_paused = False
        self.plain_step: Callable[[Any], Any] = model.train_step
        self._error: BaseException | None = None
        self._means = StepMeans(model, self._calls, self._count_rows, self._sum)
        is_masked = has_masked_loss(model) and not over.loss
        # In half precision a worker's gradients are to be as large as those of one process: they
        # overflow then where its would.
        is_scaled = isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
        self._shares_loss = is_scaled and has_keras_train_step(model) and not is_masked
        self._half = find_half_variables(model) if self._shares_loss else set()
        self._means.is_always_asked = self._shares_loss
        self._means.is_uneven = position.is_uneven and has_keras_train_step(model)
        self._share: Any = None
        self._valid = ValidStepCounter(model) if is_masked else None
        self._kinds: Kinds = []
        # Whose sparse gradients are of the same indices on all workers, as those of positions are.
        self._shared: set[int] = set()
        self._knows_shared = False
        # Masks decide the weights, if there are any.
        knows_totals = self._valid is None and position.total_rows is not None
        # A custom train_step may call apply as often as it likes.
        accumulates = knows_totals and graph is None and has_keras_train_step(model)
        self._micro_steps = count_accumulated_steps(model.optimizer) if accumulates else 1
        self._graph = graph
        self.over = over
        self.is_repeatable = graph is None  # TensorFlow's collectives need one
        self.is_split = bool(model.jit_compile)
        self.is_compressed = settings.compression is not None
        self._host = HostExchange(
            collective, position, settings, self._micro_steps, knows_totals, clock
        )
        self.agreement: Any = graph.agreement if graph else self._host.agreement

    @contextmanager
    def install(self) -> Iterator[None]:
        """Exchange gradients while the context lasts; the model is as it was afterwards."""
        model, optimizer = self._model, self._model.optimizer
        train_step, apply = model.train_step, optimizer.apply
        self.plain_step = train_step
        with ExitStack() as stack:
            # What was traced exchanges; a model may be trained on without, after a loss, too.
            stack.callback(model.make_train_function, force=True)
            stack.enter_context(self._global_batch.install())
            stack.enter_context(self._means.install())
            stack.enter_context(self._statistics.install())
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
            # A model that was fitted before keeps the function traced then, without the exchange.
            model.make_train_function(force=True)
            try:
                yield
            finally:
                self._host.close()

    @contextmanager
    def _exchanging(self) -> Iterator[None]:
        """In this context the model's step exchanges where it applies gradients."""
        model, apply = self._model, self._model.optimizer.apply
        with ExitStack() as stack:
            for each in find_optimizers(model):
                averaging = self._wrap_apply(each.apply, each is model.optimizer)
                stack.enter_context(override(each, "apply", averaging))
            step = self._wrap_step(self.plain_step, apply)
            stack.enter_context(override(model, "train_step", step))
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Let steps that are taken in this context be those of one process."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False

    @contextmanager
    def repeating(self, steps: int) -> Iterator[None]:
        """Let all workers take the last steps once more in this context, outside of a graph."""
        begun, gathered, kinds = self._begun.step, self._gathered.step, self._kinds
        self._begun.step -= steps
        self._gathered.step -= steps
        try:
            with (
                self._host.repeating(steps),
                self._exchanging() if self.is_split else nullcontext(),
            ):
                yield
        finally:
            self._begun.step, self._gathered.step, self._kinds = begun, gathered, kinds

    def count_calls(self) -> int:
        """How often the optimizer was called."""
        return _read_calls(self._model.optimizer)

    @property
    def error(self) -> BaseException | None:
        """What went wrong in an exchange: TensorFlow passes on the text alone."""
        return self._error or self._host.error or self._gathered.error or self._statistics.error

    @property
    def shared_variables(self) -> Sequence[Any]:
        """Variables of metrics that are the same on all workers."""
        return self._global_batch.variables

    def begin_training(self) -> None:
        """Read how far the optimizer is: a callback may have restored it."""
        self._host.begin_training(_read_calls(self._model.optimizer))

    def begin_epoch(self) -> None:
        """Start counting the epoch's steps."""
        self._begun.begin_epoch()
        self._gathered.step = 0
        self._host.begin_epoch()

    def end_epoch(self) -> None:
        """Nothing is left to exchange: every step has."""

    def read_state(self) -> dict[str, Any]:
        """See `Synchronizer`."""
        requested = self.agreement.is_requested
        return {
            "step": self._begun.step,
            "gathered": self._gathered.step,
            "requested": requested,
            "host": self._host.read_state(),
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """See `Synchronizer`."""
        self._begun.step = state["step"]
        self._gathered.step = state.get("gathered", state["step"])
        self.agreement.is_requested = state["requested"]
        self._host.restore_state(state["host"])

    @property
    def mean_loss(self) -> float | None:
        """Loss of the epoch, if Keras's own local means cannot be averaged by rows."""
        return None if self._valid is None else self._host.mean_loss

    def begin_step(self, rows: Any) -> Any:
        """Forget the exchanges of the step before, and of the branch of a graph before.

        Returns what `weigh_means` takes.
        """
        # With any number of rows, a known number of indices cannot come from the rows.
        self._knows_shared = tf.get_static_value(rows) is None
        self._calls.begin(rows)
        share = self._means.compute_share()
        self._share = share if self._shares_loss else None
        return share

    def weigh_means(self, share: Any) -> AbstractContextManager[None]:
        """In this context means of one number per step are weighed."""
        return self._means.weigh(share)

    def make_zeros(self, kinds: Kinds | None = None, variables: Any = None) -> list[Any]:
        """Gradients of a step without rows, of the kinds that the others have."""
        variables = variables or self._model.trainable_variables
        kinds = kinds or self._kinds or ["dense"] * len(variables)
        return [_make_zero(v, kind) for v, kind in zip(variables, kinds, strict=True)]

    def weigh_step(self, rows: Any) -> tuple[Any, Any]:
        """What the gradients of the step being traced weigh, and its mean loss, as scalars."""
        if self._valid is None:
            return tf.cast(rows, tf.float32), tf.constant(0.0)
        return self._valid.weight(rows), self._valid.loss

    def _weigh_gradients(self) -> Any:
        return self.weigh_step(self._calls.rows)[0]

    def average(
        self, gradients: list[Any], weight: Any, loss: Any, variables: Any = None
    ) -> list[Any]:
        """Mean gradients over the global batch; the same on every worker.

        Parameters
        ----------
        gradients
            Tensors, ``IndexedSlices`` and None.
        variables
            What they are the gradients of; None for all trainable variables.
        weight, loss
            Scalars: what each gradient is the mean over, and this worker's mean loss.
        """
        self._kinds = [self._classify(gradient) for gradient in gradients]
        dense = [n for n, kind in enumerate(self._kinds) if kind == "dense"]
        sparse = [n for n, kind in enumerate(self._kinds) if kind == "sparse"]
        if not dense and not sparse:
            return gradients
        variables = list(variables or self._model.trainable_variables)
        # TensorFlow does not know the shape of every gradient, of a Dense on sequences for one.
        tensors = [
            tf.ensure_shape(tf.convert_to_tensor(gradients[n]), variables[n].shape) for n in dense
        ]
        # Of one type on all workers, even if there are no rows.
        slices = [(tf.cast(gradients[n].indices, tf.int64), gradients[n].values) for n in sparse]
        anchor = min((variables[n] for n in [*dense, *sparse]), key=_count_elements)
        with self._calls.next():  # a step that applies twice exchanges twice
            parts = [part for pair in slices for part in pair]
            shared = [self._is_shared(gradients[n], variables[n]) for n in sparse]
            means = self._exchange(tensors, parts, shared, weight, loss, anchor)
        self._calls.end(means)
        result = list(gradients)
        for n, tensor, mean in zip(dense, tensors, means, strict=False):
            mean.set_shape(tensor.shape)
            # One process adds up in half precision, and overflows there.
            is_half = self._shares_loss and id(variables[n]) in self._half
            mean = tf.cast(mean, tf.float16) if is_half else mean
            result[n] = tf.cast(mean, tensor.dtype)
        for n, indices, values in zip(
            sparse, means[len(dense) :: 2], means[len(dense) + 1 :: 2], strict=True
        ):
            result[n] = _make_slices(indices, values, variables[n].shape)
        return result

    def _is_shared(self, gradient: Any, variable: Any) -> bool:
        if self._knows_shared and gradient.indices.shape[0] is not None:
            self._shared.add(id(variable))
        return id(variable) in self._shared

    def _count_rows(self, rows: int) -> float:
        """Rows of the global batch of the step that begins; called once for each."""
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
    ) -> list[Any]:
        # Half precision cannot represent a sum weighted by rows: it is exchanged as float32.
        wide = tf.float64 if any(t.dtype == tf.float64 for t in tensors) else tf.float32
        dense = [self._undo_share(tf.cast(tensor, wide)) for tensor in tensors]
        slices = [*slices]
        slices[1::2] = map(self._undo_share, slices[1::2])
        weight, loss = tf.cast(weight, wide), tf.cast(loss, wide)
        if self._graph is not None:
            return self._graph.average(dense, weight)
        number = self._calls.count_exchange()
        return self._host.average(dense, slices, shared, weight, loss, anchor, number)

    def _undo_share(self, gradient: Any) -> Any:
        """The gradient of a worker's mean loss from that of its share of it."""
        if self._share is None:
            return gradient
        return tf.math.divide_no_nan(gradient, tf.cast(self._share, gradient.dtype))

    def _wrap_scale(self, scale_loss: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def scaled(loss: Any) -> Any:
            share = self._means.share
            return scale_loss(loss if share is None else loss * tf.cast(share, loss.dtype))

        return scaled

    def _classify(self, gradient: Any) -> str | None:
        if gradient is None:
            return None
        # What is accumulated, or summed by TensorFlow, is dense.
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
                return train_step(data)

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

    def _wrap_apply(self, apply: Callable[..., Any], is_models: bool) -> Callable[..., Any]:
        def averaging_apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            if trainable_variables is None and not is_models:
                raise InputError(
                    "`apply` of an optimizer that compile() was not given needs the variables: "
                    "apply(gradients, variables)"
                )
            if self._is_paused:
                return apply(grads, trainable_variables)
            variables = None if trainable_variables is None else list(trainable_variables)
            weight, loss = self.weigh_step(self._calls.rows)
            means = self.average(list(grads), weight, loss, variables)
            kinds = self._kinds
            self._calls.record(lambda: self._apply_zeros(apply, kinds, variables))
            return apply(means, variables)

        return averaging_apply

    def _apply_zeros(self, apply: Callable[..., Any], kinds: Kinds | None, variables: Any) -> None:
        """What a worker without rows does: as a step with rows, to the same variables."""
        zeros = self.make_zeros(kinds, variables)
        share, self._share = self._share, None
        apply(self.average(zeros, 0.0, 0.0, variables), variables)
        self._share = share


def count_accumulated_steps(optimizer: Any) -> int:
    """Steps whose gradients may travel as one sum.

    One if the optimizer looks at each step's gradients: a loss-scaling one skips those that
    are not finite.
    """
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)


def _read_calls(optimizer: Any) -> int:
    """How often the optimizer was called: with accumulation, its ``iterations`` count updates."""
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
