"""Averages the gradients of all workers inside the optimizer.

Each worker's mean gradient is weighted by the rows it was computed from; the rows travel in the
same buffer, and the sum is divided by their total. That is the mean gradient over the global
batch, whatever the split. Clipping, weight decay and momenta act after it, inside the optimizer,
as in one process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from pybackend.collective import Collective
from pybackend.engine.flat import Agreement, FlatExchange, Layout
from pybackend.engine.graph import GraphExchange
from pybackend.engine.sparse import all_slices
from pybackend.engine.split import SplitStep
from pybackend.engine.steps import Position, StepOrSkip, is_plain, replaced, rows_in, uncompiled
from pybackend.engine.valid_steps import ValidStepCounter
from pybackend.model.masks import has_masked_loss


@dataclass(frozen=True)
class Wire:
    """How gradients travel: see `barrier_train`."""

    nominal_rows: int
    bucket_bytes: float
    compression: Literal["fp16", "bf16"] | None = None


Kinds = list[str | None]
"""Per gradient ``"dense"``, ``"sparse"`` or None where there is none."""


class GradientExchange:
    """Couples one compiled model to a collective for the duration of a ``fit``.

    The optimizer *instance* gets a new ``apply``, not its class, so that saved models know
    nothing of it.

    Parameters
    ----------
    position
        Of this step in its epoch; advanced with every step.
    may_be_empty
        Local batches may have no rows: such a step skips the model and adds nothing to the sum.
    graph
        Exchanges by TensorFlow's collectives instead, without compression; every step exchanges.
    """

    def __init__(
        self,
        model: Any,
        collective: Collective,
        position: Position,
        wire: Wire,
        may_be_empty: bool,
        graph: GraphExchange | None = None,
    ) -> None:
        self._model = model
        self._collective = collective
        self._position = position
        self._wire = wire
        self._may_be_empty = may_be_empty
        self._masked = has_masked_loss(model)
        self._valid = ValidStepCounter(model) if self._masked else None
        self._rows: Any = None
        self._kinds: Kinds = []
        # Of the step being traced: its calls of apply, and the last of its exchanges.
        self._applied: list[tuple[Kinds, Any]] = []
        self._previous: list[Any] = []
        self._flats: dict[Any, FlatExchange] = {}
        # Where masks decide the weights, no worker knows a step's total without asking.
        self._asks = self._masked or position.total_rows is None
        # A train_step of the user's own may call apply as often as it likes.
        exchanges_all = self._asks or graph is not None or not is_plain(model)
        self._micro_steps = 1 if exchanges_all else accumulation_steps(model.optimizer)
        self._calls = 0
        self._loss_sum = 0.0
        self._rows_sum = 0
        self._graph = graph
        self.agreement: Any = graph.agreement if graph else Agreement()
        self.error: BaseException | None = None
        """What went wrong in an exchange: TensorFlow passes on the text alone."""

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Exchange gradients while the context lasts; the model is as it was afterwards."""
        model, optimizer = self._model, self._model.optimizer
        train_step, apply = model.train_step, optimizer.apply
        with ExitStack() as stack:
            if self._valid is not None:
                watched = self._valid.watch(model.compute_loss)
                stack.enter_context(replaced(model, "compute_loss", watched))
            if model.jit_compile:
                # XLA compiles what lies before and after the exchange, but not the exchange.
                stack.enter_context(uncompiled(model))
                step: Any = SplitStep(model, train_step, apply, self)
            else:
                stack.enter_context(replaced(optimizer, "apply", self._averaging(apply)))
                step = self._counting(train_step, apply)
            stack.enter_context(replaced(model, "train_step", step))
            # A model that was fitted before keeps the function traced then, without the exchange.
            model.make_train_function(force=True)
            try:
                yield
            finally:
                for flat in self._flats.values():
                    flat.close()
        model.make_train_function(force=True)

    def begin_training(self) -> None:
        """Read how far the optimizer is: a callback may have restored it."""
        self._calls = _steps_counted(self._model.optimizer)

    def begin_epoch(self) -> None:
        """Start counting the epoch's steps."""
        self._position.begin_epoch()
        self._loss_sum, self._rows_sum = 0.0, 0

    def end_epoch(self) -> None:
        """Nothing is left to exchange: every step has."""

    @property
    def mean_loss(self) -> float | None:
        """Loss of the epoch, where Keras's own local means cannot be averaged by rows."""
        return self._loss_sum / self._rows_sum if self._masked and self._rows_sum else None

    def _counting(
        self, train_step: Callable[[Any], Any], apply: Callable[..., Any]
    ) -> Callable[[Any], Any]:
        def counting_train_step(data: Any) -> Any:
            self.begin_step(rows_in(data))
            return train_step(data)

        def skip() -> None:
            # As often as a step with rows applies gradients, and to the same variables.
            applied: list[tuple[Kinds | None, Any]] = [*self._applied]
            self.begin_step(tf.constant(0))
            for kinds, variables in applied or [(None, None)]:
                zeros = self.zeros(kinds, variables)
                apply(self.averaged(zeros, 0.0, 0.0, variables), variables)
            self._applied = [(kinds, variables) for kinds, variables in applied if kinds]

        if not self._may_be_empty:
            return counting_train_step
        return StepOrSkip(self._model, counting_train_step, skip)

    def begin_step(self, rows: Any) -> None:
        """Forget the exchanges of the step before, and of the branch of a graph before."""
        self._rows, self._applied, self._previous = rows, [], []

    def zeros(self, kinds: Kinds | None = None, variables: Any = None) -> list[Any]:
        """Gradients of a step without rows, of the kinds that the others have."""
        variables = variables or self._model.trainable_variables
        kinds = kinds or self._kinds or ["dense"] * len(variables)
        return [_zero(v, kind) for v, kind in zip(variables, kinds, strict=True)]

    def _averaging(self, apply: Callable[..., Any]) -> Callable[..., Any]:
        def averaging_apply(grads: Sequence[Any], trainable_variables: Any = None) -> Any:
            variables = None if trainable_variables is None else list(trainable_variables)
            weight, loss = self.weight_and_loss(self._rows)
            means = self.averaged(list(grads), weight, loss, variables)
            self._applied.append((self._kinds, variables))
            return apply(means, variables)

        return averaging_apply

    def weight_and_loss(self, rows: Any) -> tuple[Any, Any]:
        """What the gradients of the step being traced weigh, and its mean loss, as scalars."""
        if self._valid is None:
            return tf.cast(rows, tf.float32), tf.constant(0.0)
        return self._valid.weight(rows), self._valid.loss

    def averaged(
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
        self._kinds = [self._kind(gradient) for gradient in gradients]
        dense = [n for n, kind in enumerate(self._kinds) if kind == "dense"]
        sparse = [n for n, kind in enumerate(self._kinds) if kind == "sparse"]
        if not dense and not sparse:
            return gradients
        variables = list(variables or self._model.trainable_variables)
        # TensorFlow does not know the shape of every gradient, of a Dense on sequences for one.
        tensors = [
            tf.ensure_shape(tf.convert_to_tensor(gradients[n]), variables[n].shape) for n in dense
        ]
        # Half precision cannot hold a sum weighted by rows: it is exchanged as float32.
        wide = tf.float64 if any(t.dtype == tf.float64 for t in tensors) else tf.float32
        # Of one type on all workers, also where there are no rows.
        slices = [(tf.cast(gradients[n].indices, tf.int64), gradients[n].values) for n in sparse]
        parts = [part for pair in slices for part in pair]
        wide_tensors = [tf.cast(tensor, wide) for tensor in tensors]
        # A step that applies twice exchanges twice, in one order on all workers.
        with tf.control_dependencies(self._previous):
            smallest = min((variables[n] for n in [*dense, *sparse]), key=_size)
            means = self._means(
                wide_tensors, parts, tf.cast(weight, wide), tf.cast(loss, wide), smallest
            )
        self._previous = [] if tf.executing_eagerly() else means[:1]
        result = list(gradients)
        for n, tensor, mean in zip(dense, tensors, means, strict=False):
            mean.set_shape(tensor.shape)
            result[n] = tf.cast(mean, tensor.dtype)
        for place, n in enumerate(sparse):
            indices, values = means[len(dense) + 2 * place :][:2]
            indices.set_shape([None])
            shape = list(variables[n].shape)
            values.set_shape([None, *shape[1:]])
            result[n] = tf.IndexedSlices(values, indices, tf.constant(shape, tf.int64))
        return result

    def _kind(self, gradient: Any) -> str | None:
        if gradient is None:
            return None
        # What is accumulated, or summed by TensorFlow, is dense.
        adds_up = self._micro_steps > 1 or self._graph is not None
        return "sparse" if isinstance(gradient, tf.IndexedSlices) and not adds_up else "dense"

    def _means(
        self, dense: list[Any], parts: list[Any], weight: Any, loss: Any, smallest: Any
    ) -> list[Any]:
        if self._graph is not None:
            return self._graph.means(dense, weight)
        flat = self._flat([tuple(t.shape) for t in dense], weight.dtype)
        types = [tensor.dtype for tensor in [*dense, *parts]]
        buckets = flat.layout.buckets
        if len(buckets) == 1 or tf.executing_eagerly():
            step = partial(self._step, flat, len(dense))
            return list(tf.numpy_function(step, [weight, loss, *dense, *parts], types))
        # Tokens tie the buckets to the end of the step. They wait for the gradients and, by a
        # weight that is updated, for the end of the step before: a gradient may depend on the
        # data alone.
        begun = tf.reshape(tf.convert_to_tensor(smallest), [-1])[:1]
        tokens = [
            tf.numpy_function(
                partial(self._post, flat, number),
                [begun, weight, *(dense[n] for n in bucket)],
                tf.int32,
            )
            for number, bucket in enumerate(buckets)
        ]
        collect = partial(self._collect, flat, len(tokens))
        return list(tf.numpy_function(collect, [weight, loss, *tokens, *parts], types))

    def _flat(self, shapes: list[tuple[int, ...]], dtype: Any) -> FlatExchange:
        key = (tuple(shapes), dtype.name)
        if key not in self._flats:
            # Accumulated gradients travel at once, when their last step has come.
            limit = float("inf") if self._micro_steps > 1 else self._wire.bucket_bytes
            flat = FlatExchange(
                self._collective,
                Layout.of(shapes, dtype.size, limit),
                dtype.as_numpy_dtype,
                self.agreement,
                nominal=self._nominal,
                compression=self._wire.compression,
            )
            self._flats[key] = flat
        return self._flats[key]

    def _nominal(self) -> float:
        total = None if self._asks else self._position.total_rows
        return float(self._wire.nominal_rows if total is None else total)

    def _step(self, flat: FlatExchange, dense: int, weight: Any, loss: Any, *arrays: Any) -> Any:
        with self._remembering_errors():
            if self._micro_steps == 1:
                means, total = flat.exchange(weight, loss, arrays[:dense])
            else:
                share = weight / self._nominal()
                # What is pending at the end of an epoch is sent, so that all are in one state.
                is_due = (self._calls + 1) % self._micro_steps == 0 or self._position.is_last
                means, total = flat.accumulate(share, loss, arrays[:dense], is_due)
            return self._finished(flat, means, arrays[dense:], weight, total)

    def _post(self, flat: FlatExchange, bucket: int, _: Any, weight: Any, *arrays: Any) -> Any:
        with self._remembering_errors():
            flat.post(bucket, weight, arrays)
            return np.int32(bucket)

    def _collect(self, flat: FlatExchange, tokens: int, weight: Any, loss: Any, *rest: Any) -> Any:
        with self._remembering_errors():
            means, total = flat.collect(weight, loss)
            return self._finished(flat, means, rest[tokens:], weight, total)

    def _finished(
        self, flat: FlatExchange, means: list[Any], parts: Sequence[Any], weight: Any, total: float
    ) -> list[Any]:
        """All results of an exchange; sparse ones travel after the buckets."""
        factor = weight / total if total else 0.0
        for indices, values in zip(parts[::2], parts[1::2], strict=True):
            scaled = (values * factor).astype(values.dtype)
            means = [*means, *all_slices(self._collective, indices, scaled)]
        rows = self._position.total_rows or 0
        self._loss_sum += flat.mean_loss * rows
        self._rows_sum += rows
        self._position.advance()
        self._calls += 1
        return means

    @contextmanager
    def _remembering_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = self.error or error
            raise


def accumulation_steps(optimizer: Any) -> int:
    """Steps whose gradients may travel as one sum.

    One where the optimizer looks at each step's gradients: a loss-scaling one skips those that
    are not finite.
    """
    return int(getattr(optimizer, "gradient_accumulation_steps", None) or 1)


def _steps_counted(optimizer: Any) -> int:
    """How often the optimizer was called: with accumulation, its ``iterations`` count updates."""
    return next(int(v.numpy()) for v in optimizer.variables if v.name == "iteration")


def _size(variable: Any) -> int:
    return int(np.prod(variable.shape, dtype=np.int64))


def _zero(variable: Any, kind: str | None) -> Any:
    if kind is None:
        return None
    shape, dtype = list(variable.shape), variable.dtype
    if kind == "dense":
        return tf.zeros(shape, dtype)
    rows = tf.zeros([0, *shape[1:]], dtype)
    return tf.IndexedSlices(rows, tf.zeros([0], tf.int64), tf.constant(shape, tf.int64))
