"""Means of a step's gradients over the workers: from the host, or inside TensorFlow's graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from pybackend.core.collective import Collective
from pybackend.core.collective.tensorflow import GraphReduce
from pybackend.core.engine.exchange import flat_buffer
from pybackend.core.engine.exchange.flat_buffer import BufferLayout, FlatExchange
from pybackend.core.engine.step_changes import Position, RemembersErrors, call_host, override
from pybackend.core.engine.step_clock import StepClock

Array = npt.NDArray[Any]


class SumRecord(Protocol):
    """Methods of a `StepRecord` that an exchange needs, for terms of the sums, and the sums."""

    @property
    def count(self) -> int: ...
    def weigh(self, step: int, values: Sequence[Array]) -> Array: ...
    def keep(self, step: int, values: Sequence[Array], sums: Array) -> None: ...


@dataclass(frozen=True)
class StepGradients:
    """Gradients of one exchange, as tensors of the step being traced.

    Attributes
    ----------
    dense
        Tensors of one type.
    slices
        Indices and values of sparse gradients, alternating.
    shared
        For each sparse gradient, whether its indices are the same on all workers.
    weight, loss
        Scalars: this worker's weight in the means, e.g. its number of rows, and its mean loss.
    anchor
        A variable that every step updates; buckets wait for it.
    owners
        Rank that needs the mean of each dense gradient, which the others do not get. Empty: all
        ranks get all means.
    """

    dense: list[Any]
    slices: list[Any]
    shared: Sequence[bool]
    weight: Any
    loss: Any
    anchor: Any
    owners: Sequence[int] = ()


@dataclass(frozen=True)
class Exchanged:
    """Gradients of one exchange.

    Attributes
    ----------
    weight, total
        This worker's weight in the means, and that of all workers.
    own
        This worker's gradients: the dense ones, then indices and values of the sparse ones.
    means
        The mean gradients in the same order; of the dense ones, those in ``needed``.
    needed
        Numbers of the dense gradients whose means this rank needs.
    """

    weight: float
    total: float
    own: list[Array]
    means: list[Array]
    needed: list[int]

    def with_parts(self, parts: Sequence[tuple[Sequence[int], Sequence[Array]]]) -> Exchanged:
        """Return it with the means of all dense gradients, given those of each rank."""
        whole = dict(pair for needed, means in parts for pair in zip(needed, means, strict=True))
        means = [*(whole[n] for n in sorted(whole)), *self.means[len(self.needed) :]]
        return replace(self, means=means, needed=sorted(whole))


class HostExchange(RemembersErrors):
    """Mean of each step's gradients, with NumPy and sockets, called from TensorFlow's graph.

    ``position`` is that of the current step in its epoch, which every exchange advances.
    ``micro_steps`` is the number of steps whose gradients are exchanged as one sum. With
    ``knows_totals``, each worker knows the total weight of a step without communication. ``parts``
    has the weights that each rank updates; None: each rank updates all.
    """

    def __init__(
        self,
        collective: Collective,
        position: Position,
        settings: flat_buffer.TransferSettings,
        micro_steps: int,
        knows_totals: bool,
        clock: StepClock,
        parts: flat_buffer.Parts | None = None,
        record: SumRecord | None = None,
    ) -> None:
        self._collective, self._position, self._settings = collective, position, settings
        self._micro_steps, self._knows_totals = micro_steps, knows_totals
        self._clock, self._parts, self._record = clock, parts, record
        self._flats: dict[Any, FlatExchange] = {}
        self._buffers: dict[Any, flat_buffer.Buffers] = {}
        # State of buffers that a step will create when it is traced.
        self._restored: dict[str, Any] = {}
        self._calls, self._loss_sum, self._rows_sum = 0, 0.0, 0
        self._is_repeating = False
        self.is_due = True
        """True if the last exchange was not only added to the accumulated gradients."""
        self.agreement = flat_buffer.StopAgreement()
        self.exchanged: list[Exchanged] | None = None
        """Copies of all gradients exchanged since this was set to a list; None: no copies."""
        self._posted: dict[int, Array] = {}

    @property
    def mean_loss(self) -> float | None:
        """Loss of the epoch so far: the weighted mean over its steps."""
        return self._loss_sum / self._rows_sum if self._rows_sum else None

    def begin_training(self, calls: int) -> None:
        """Start with an optimizer that has already been called this many times."""
        self._calls = calls

    def begin_epoch(self) -> None:
        self._position.begin_epoch()
        self._loss_sum, self._rows_sum = 0.0, 0

    def read_state(self) -> dict[str, Any]:
        """Return the state between steps: the epoch's sums, and what has not been sent yet."""
        flats = {repr(key): flat.read_state() for key, flat in self._flats.items()}
        return {
            "step": self._position.step,
            "calls": self._calls,
            "loss": self._loss_sum,
            "rows": self._rows_sum,
            "flats": {**self._restored, **flats},
        }

    def restore_state(self, state: Mapping[str, Any]) -> None:
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
        """Repeat the last steps within this context, without compression."""
        state = self.read_state()
        self._position.step -= steps
        self._calls -= steps
        try:
            with override(self, "_is_repeating", True):
                yield
        finally:
            self.restore_state(state)

    def close(self) -> None:
        """End the threads that send buckets."""
        for flat in self._flats.values():
            flat.close()

    def average(
        self, gradients: StepGradients, number: int = 0, recorded: Sequence[Any] = ()
    ) -> list[Any]:
        """Return the mean gradients, as tensors of the step being traced.

        ``number`` counts the exchanges within a step, each of which has its own buffers and
        residuals. ``recorded`` has the values of the record's variables.
        """
        flat = self._flat_for(gradients, number)
        weight, given = gradients.weight, gradients.dense
        needed = [given[n] for n in flat.layout.list_needed(self._collective.rank)]
        types = [tensor.dtype for tensor in [*needed, *gradients.slices]]
        buckets = flat.layout.buckets
        is_posted = len(buckets) > 1 and not tf.executing_eagerly()
        if is_posted:
            # Tokens connect the buckets to the end of the step. They wait for the gradients and,
            # through a weight that is updated, for the end of the previous step, because a
            # gradient may depend only on the data.
            begun = tf.reshape(tf.convert_to_tensor(gradients.anchor), [-1])[:1]
            ready = [[begun, weight, *(given[n] for n in numbers)] for numbers in buckets]
            given = [
                tf.numpy_function(partial(self._post, flat, bucket), tensors, tf.int32)
                for bucket, tensors in enumerate(ready)
            ]
        finish = partial(self._finish, flat, is_posted, len(given), gradients.shared)
        ends = [*gradients.slices, *recorded]
        return call_host(finish, [weight, gradients.loss, *given, *ends], types)

    def gather_weights(self, dtype: Any) -> Callable[..., list[Array]]:
        """Return a function from this rank's weights, in one type, to those of the other ranks."""
        assert self._parts is not None
        layout, buffers = self._lay_out_weights(dtype)
        own = layout.list_needed(self._collective.rank)
        others = sorted(set(range(len(layout.shapes))) - set(own))

        def gather(*arrays: Any) -> list[Array]:
            with self.remembering(), self._clock.held():
                flat = buffers.take(layout.size)
                for number, array in zip(own, arrays, strict=True):
                    flat[layout.spans[number]] = array.reshape(-1)
                self._collective.gather_parts(flat[: -flat_buffer.TAIL], layout.ends[0])
                return [flat[layout.spans[n]].reshape(layout.shapes[n]) for n in others]

        return gather

    def _lay_out_weights(self, dtype: Any) -> tuple[BufferLayout, flat_buffer.Buffers]:
        """Return the layout of all weights, and buffers that gradients use before them.

        A worker thus needs one buffer for both: the gradients are not longer.
        """
        assert self._parts is not None
        parts, ranks = self._parts, self._collective.world_size
        layout = BufferLayout.of(parts.shapes, dtype.size, float("inf"), parts.owners, ranks)
        if dtype not in self._buffers:
            buffers = flat_buffer.Buffers(layout.size, np.dtype(dtype.as_numpy_dtype))
            self._buffers[dtype] = buffers
        return layout, self._buffers[dtype]

    def _flat_for(self, gradients: StepGradients, number: int) -> FlatExchange:
        shapes = [tuple(tensor.shape) for tensor in gradients.dense]
        dtype, owners = gradients.weight.dtype, gradients.owners
        compression = None if self._is_repeating else self._settings.compression
        # Checkpoints contain the text of this key.
        key = (tuple(shapes), dtype.name, number, compression)
        if key not in self._flats:
            # Accumulated gradients are sent as one bucket, in their last step.
            limit = float("inf") if self._micro_steps > 1 else self._settings.bucket_bytes
            added = self._record.count if self._record else 0
            ranks = self._collective.world_size
            flat = self._flats[key] = FlatExchange(
                self._collective,
                BufferLayout.of(shapes, dtype.size, limit, owners, ranks, added),
                dtype.as_numpy_dtype,
                self.agreement,
                nominal=self._nominal_weight,
                compression=compression,
                buffers=self._lay_out_weights(dtype)[1] if owners else None,
            )
            if not self._is_repeating:
                self._clock.buffers += flat.sizes
            if repr(key) in self._restored:
                flat.restore_state(self._restored.pop(repr(key)))
        return self._flats[key]

    def _nominal_weight(self) -> float:
        total = self._position.total_rows if self._knows_totals else None
        return float(self._settings.nominal_rows if total is None else total)

    def _post(self, flat: FlatExchange, bucket: int, _: Any, weight: Any, *arrays: Any) -> Any:
        with self.remembering():
            flat.post(bucket, weight, arrays)
            if self.exchanged is not None:
                numbers = flat.layout.buckets[bucket]
                self._posted.update(zip(numbers, map(np.array, arrays), strict=True))
            return np.int32(bucket)

    def _finish(
        self, flat: FlatExchange, is_posted: bool, count: int, shared: Sequence[bool], *given: Any
    ) -> list[Array]:
        """Return all results of an exchange; sparse gradients are sent after the buckets.

        ``given`` has the weight and the loss; ``count`` dense gradients, or tokens of buckets if
        these were posted; the sparse gradients; and the recorded values.
        """
        weight, loss, *arrays = given
        dense, ends = arrays[:count], arrays[count:]
        slices, recorded = ends[: 2 * len(shared)], ends[2 * len(shared) :]
        record, position = self._record, self._position
        with self.remembering(), self._clock.held():
            added = record.weigh(position.step, recorded) if record else ()
            if is_posted:
                means, total = flat.collect(weight, loss, added)
                dense, self._posted = [self._posted[n] for n in sorted(self._posted)], {}
            elif self._micro_steps == 1:
                means, total = flat.exchange(weight, loss, dense, added)
            else:
                # Pending gradients are sent at the end of an epoch, so that all workers have the
                # same state.
                is_last = position.step == position.batches.steps - 1
                self.is_due = is_last or (self._calls + 1) % self._micro_steps == 0
                share = weight / self._nominal_weight()
                means, total = flat.accumulate(share, loss, dense, self.is_due)
            factor = weight / total if total else 0.0
            for indices, values, is_shared in zip(slices[::2], slices[1::2], shared, strict=True):
                scaled = (values * factor).astype(values.dtype)
                means = [*means, *gather_slices(self._collective, indices, scaled, is_shared)]
            # The mean loss is that of a whole step: weighted by its rows, like Keras's own.
            rows = position.total_rows or 0
            self._loss_sum += flat.mean_loss * rows
            self._rows_sum += rows
            position.advance()
            self._calls += 1
            if record is not None and not self._is_repeating:
                record.keep(position.step, recorded, flat.added)
            if self.exchanged is not None:  # TensorFlow and the next exchange reuse the memory
                own, copies = ([np.array(x) for x in part] for part in ([*dense, *slices], means))
                needed = flat.layout.list_needed(self._collective.rank)
                self.exchanged.append(Exchanged(float(weight), total, own, copies, needed))
            return means


def gather_slices(
    collective: Collective, indices: Array, values: Array, is_shared: bool = False
) -> tuple[Array, Array]:
    """Concatenate all workers' gradients for rows of an embedding, in rank order.

    Only the rows that a batch uses are sent, never a whole table. Rows with the same index are not
    added up, because Keras's optimizers use each one separately (a square in Adam, a norm in
    clipping), as in one process. If the indices do not depend on the training rows, such as
    positions, one process has each index only once: with ``is_shared``, the values of all workers
    are added up, provided that the indices are the same.

    ``indices`` are whole numbers in shape (n,), with another n on each worker; ``values`` have
    shape (n, ...).
    """
    everyone = [collective.all_gather(np.ascontiguousarray(part)) for part in (indices, values)]
    all_indices, all_values = everyone
    if is_shared:
        present = [n for n, own in enumerate(all_indices) if len(own)]
        if all(np.array_equal(all_indices[n], all_indices[present[0]]) for n in present):
            total = np.sum([all_values[n] for n in present], axis=0, dtype=values.dtype)
            return (all_indices[present[0]], total) if present else (indices, values)
    return np.concatenate(all_indices), np.concatenate(all_values)


def _held_by(name: str) -> Any:
    """Return a property whose value is in a variable of the graph, in the attribute ``name``."""
    return property(
        lambda self: bool(getattr(self, name).numpy()),
        lambda self, value: getattr(self, name).assign(value),
    )


class GraphAgreement:
    """`StopAgreement` in variables that the graph reads and writes."""

    is_requested = _held_by("requested")
    is_preempted = _held_by("preempted")
    is_agreed = _held_by("agreed")

    def __init__(self) -> None:
        self.requested = tf.Variable(False, trainable=False)
        self.preempted = tf.Variable(False, trainable=False)
        self.agreed = tf.Variable(False, trainable=False)


class GraphExchange:
    """Average of gradients like `FlatExchange`, without leaving the graph."""

    def __init__(self, reduce: GraphReduce, bucket_bytes: float) -> None:
        self._reduce, self._bucket_bytes = reduce, bucket_bytes
        self.agreement = GraphAgreement()

    def average(self, tensors: list[Any], weight: Any) -> list[Any]:
        """Return the mean of each tensor over the total weight of all workers."""
        shapes = [tuple(t.shape) for t in tensors]
        layout = BufferLayout.of(shapes, weight.dtype.size, self._bucket_bytes)
        wants_end = tf.logical_or(self.agreement.requested, self.agreement.preempted)
        tail = tf.stack([weight, tf.cast(wants_end, weight.dtype)])
        # First, so that every bucket can be divided as it arrives.
        total, stop = tf.unstack(self._reduce.all_reduce(tail))
        # If no worker has rows, the means are zeros; this avoids a division by zero.
        total = tf.where(total > 0, total, tf.ones_like(total))
        self.agreement.agreed.assign(tf.logical_or(self.agreement.agreed, stop > 0))
        means = list(tensors)
        for numbers in filter(None, layout.buckets):
            flat = tf.concat([tf.reshape(tensors[n], [-1]) for n in numbers], 0)
            summed = self._reduce.all_reduce(flat * weight) / total
            sizes = [int(tensors[n].shape.num_elements()) for n in numbers]
            for n, part in zip(numbers, tf.split(summed, sizes), strict=True):
                means[n] = tf.reshape(part, tensors[n].shape)
        return means
