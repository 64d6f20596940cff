"""Gradients leave TensorFlow's graph here: averaged by numpy and sockets, bucket by bucket."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from pybackend.collective import Collective
from pybackend.engine.flat import FlatExchange, StopAgreement
from pybackend.engine.layout import Layout
from pybackend.engine.step_clock import StepClock
from pybackend.engine.steps import Position

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class TransferSettings:
    """How gradients travel: see `barrier_train`."""

    nominal_rows: int
    bucket_bytes: float
    compression: Literal["fp16", "bf16"] | None = None


class HostExchange:
    """Averages the gradients of each step over the workers, called from TensorFlow's graph.

    Parameters
    ----------
    position
        Of this step in its epoch; advanced with every step.
    micro_steps
        Steps whose gradients travel as one sum.
    knows_totals
        Whether each worker knows the total weight of a step without asking the others.
    clock
        Notes for how long exchanges hold up the steps.
    """

    def __init__(
        self,
        collective: Collective,
        position: Position,
        settings: TransferSettings,
        micro_steps: int,
        knows_totals: bool,
        clock: StepClock,
    ) -> None:
        self._collective = collective
        self._position = position
        self._settings = settings
        self._micro_steps = micro_steps
        self._knows_totals = knows_totals
        self._clock = clock
        self._flats: dict[Any, FlatExchange] = {}
        self._calls = 0
        self._loss_sum = 0.0
        self._rows_sum = 0
        # Of buffers that a step makes when it is traced.
        self._restored: dict[str, Any] = {}
        self._is_repeating = False
        self.agreement = StopAgreement()
        self.error: BaseException | None = None
        """What went wrong in an exchange: TensorFlow passes on the text alone."""

    @property
    def mean_loss(self) -> float | None:
        """Loss of the epoch so far, averaged by the weights of its steps."""
        return self._loss_sum / self._rows_sum if self._rows_sum else None

    def begin_training(self, calls: int) -> None:
        """Start from an optimizer that was called so often before."""
        self._calls = calls

    def begin_epoch(self) -> None:
        """Start counting the epoch's steps."""
        self._position.begin_epoch()
        self._loss_sum, self._rows_sum = 0.0, 0

    def read_state(self) -> dict[str, Any]:
        """What is kept from step to step: sums of the epoch, and what was not sent yet."""
        flats = {repr(key): flat.read_state() for key, flat in self._flats.items()}
        return {
            "step": self._position.step,
            "calls": self._calls,
            "loss": self._loss_sum,
            "rows": self._rows_sum,
            "flats": {**self._restored, **flats},
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
        """Continue from what `read_state` returned."""
        self._position.step, self._calls = state["step"], state["calls"]
        self._loss_sum, self._rows_sum = state["loss"], state["rows"]
        self._restored = dict(state["flats"])
        for key in list(self._flats):
            if repr(key) in self._restored:
                self._flats[key].restore_state(self._restored.pop(repr(key)))
            else:
                self._flats.pop(key).close()

    @contextmanager
    def repeating(self, steps: int) -> Iterator[None]:
        """In this context the last steps are taken once more, and nothing is compressed."""
        state = self.read_state()
        self._position.step -= steps
        self._calls -= steps
        self._is_repeating = True
        try:
            yield
        finally:
            self._is_repeating = False
            self.restore_state(state)

    def close(self) -> None:
        """End the threads that send buckets."""
        for flat in self._flats.values():
            flat.close()

    def average(
        self,
        dense: list[Any],
        slices: list[Any],
        shared: Sequence[bool],
        weight: Any,
        loss: Any,
        anchor: Any,
        number: int = 0,
    ) -> list[Any]:
        """Mean gradients, as tensors of the step being traced.

        Parameters
        ----------
        dense
            Tensors of one type.
        slices
            Indices and values of sparse gradients, in turns.
        shared
            Whether these indices are the same on all workers.
        weight, loss
            Scalars: what each gradient is the mean over, and this worker's mean loss.
        anchor
            A variable that every step updates: buckets wait for it.
        number
            Of the exchange in its step: each has its own buffers, and rounding errors to repay.
        """
        flat = self._flat_for([tuple(t.shape) for t in dense], weight.dtype, number)
        types = [tensor.dtype for tensor in [*dense, *slices]]
        buckets = flat.layout.buckets
        if len(buckets) == 1 or tf.executing_eagerly():
            step = partial(self._step, flat, len(dense), shared)
            return list(tf.numpy_function(step, [weight, loss, *dense, *slices], types))
        # Tokens tie the buckets to the end of the step. They wait for the gradients and, by a
        # weight that is updated, for the end of the step before: a gradient may depend on the
        # data alone.
        begun = tf.reshape(tf.convert_to_tensor(anchor), [-1])[:1]
        tokens = [
            tf.numpy_function(
                partial(self._post, flat, number),
                [begun, weight, *(dense[n] for n in bucket)],
                tf.int32,
            )
            for number, bucket in enumerate(buckets)
        ]
        collect = partial(self._collect, flat, len(tokens), shared)
        return list(tf.numpy_function(collect, [weight, loss, *tokens, *slices], types))

    def _flat_for(self, shapes: list[tuple[int, ...]], dtype: Any, number: int) -> FlatExchange:
        compression = None if self._is_repeating else self._settings.compression
        key = (tuple(shapes), dtype.name, number, compression)
        if key not in self._flats:
            # Accumulated gradients travel at once, when their last step has come.
            limit = float("inf") if self._micro_steps > 1 else self._settings.bucket_bytes
            self._flats[key] = FlatExchange(
                self._collective,
                Layout.of(shapes, dtype.size, limit),
                dtype.as_numpy_dtype,
                self.agreement,
                nominal=self._nominal_weight,
                compression=compression,
            )
            if not self._is_repeating:
                self._clock.buffers += self._flats[key].sizes
            if repr(key) in self._restored:
                self._flats[key].restore_state(self._restored.pop(repr(key)))
        return self._flats[key]

    def _nominal_weight(self) -> float:
        total = self._position.total_rows if self._knows_totals else None
        return float(self._settings.nominal_rows if total is None else total)

    def _step(
        self,
        flat: FlatExchange,
        dense: int,
        shared: Sequence[bool],
        weight: Any,
        loss: Any,
        *arrays: Any,
    ) -> Any:
        with self._remember_errors(), self._clock.held():
            if self._micro_steps == 1:
                means, total = flat.exchange(weight, loss, arrays[:dense])
            else:
                share = weight / self._nominal_weight()
                # What is pending at the end of an epoch is sent, so that all are in one state.
                is_due = (self._calls + 1) % self._micro_steps == 0 or self._position.is_last
                means, total = flat.accumulate(share, loss, arrays[:dense], is_due)
            return self._finish(flat, means, arrays[dense:], shared, weight, total)

    def _post(self, flat: FlatExchange, bucket: int, _: Any, weight: Any, *arrays: Any) -> Any:
        with self._remember_errors():
            flat.post(bucket, weight, arrays)
            return np.int32(bucket)

    def _collect(
        self,
        flat: FlatExchange,
        tokens: int,
        shared: Sequence[bool],
        weight: Any,
        loss: Any,
        *rest: Any,
    ) -> Any:
        with self._remember_errors(), self._clock.held():
            means, total = flat.collect(weight, loss)
            return self._finish(flat, means, rest[tokens:], shared, weight, total)

    def _finish(
        self,
        flat: FlatExchange,
        means: list[Any],
        slices: Sequence[Any],
        shared: Sequence[bool],
        weight: Any,
        total: float,
    ) -> list[Any]:
        """All results of an exchange; sparse ones travel after the buckets."""
        factor = weight / total if total else 0.0
        for indices, values, is_shared in zip(slices[::2], slices[1::2], shared, strict=True):
            scaled = (values * factor).astype(values.dtype)
            means = [*means, *gather_slices(self._collective, indices, scaled, is_shared)]
        rows = self._position.total_rows or 0
        self._loss_sum += flat.mean_loss * rows
        self._rows_sum += rows
        self._position.advance()
        self._calls += 1
        return means

    @contextmanager
    def _remember_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = self.error or error
            raise


# Gradients of embeddings over the workers: the rows that their batches touched, never a table.


def gather_slices(
    collective: Collective, indices: Array, values: Array, is_shared: bool = False
) -> tuple[Array, Array]:
    """All workers' rows of a table one after the other, in the order of the ranks.

    Rows of one index are not added up: Keras's optimizers take each by itself (a square in Adam, a
    norm in clipping), so that is what equals a single process. But if the indices are no part of
    the rows, as those of positions are, one process has each of them once.

    Parameters
    ----------
    indices
        Shape (n,), whole numbers; n differs between the workers.
    values
        Shape (n, ...).
    is_shared
        The indices do not come from the workers' rows, and those of all workers are added up, if
        they are the same.
    """
    everyone = [collective.all_gather(np.ascontiguousarray(part)) for part in (indices, values)]
    all_indices, all_values = everyone
    if is_shared:
        present = [n for n, own in enumerate(all_indices) if len(own)]
        if all(np.array_equal(all_indices[n], all_indices[present[0]]) for n in present):
            total = np.sum([all_values[n] for n in present], axis=0, dtype=values.dtype)
            return (all_indices[present[0]], total) if present else (indices, values)
    return np.concatenate(all_indices), np.concatenate(all_values)
