"""Faults in the workers' own code, by name and size, and the models that they are tested on.

Each fault replaces functions of a worker before it trains. A size of 0 would be no fault. A fault
needs no more than numpy and the package: workers get its functions by value.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import tensorflow as tf
from auditing import models
from auditing.models import MODELS, OPTIMIZERS, OUT, dense, plain, stack
from auditing.subject import Change, Fault, Subject

from pybackend.core.data.sharding import Visits
from pybackend.core.engine import sync
from pybackend.core.engine.exchange import transports
from pybackend.core.engine.exchange.flat_buffer import TAIL, FlatExchange
from pybackend.core.engine.exchange.gradient_exchange import GradientExchange
from pybackend.core.engine.exchange.shards import ShardedUpdate
from pybackend.core.engine.lifecycle import Lifecycle
from pybackend.core.engine.row_batches import RowBatches
from pybackend.core.engine.statistics import metrics
from pybackend.core.engine.sync import EpochSync
from pybackend.core.job.worker_options import Exchange

# --- subjects ---

LARGE_RATE: Callable[[], Any] = lambda: models.optimizers.SGD(0.2, momentum=0.5)  # noqa: E731
SUBJECTS: dict[str, Subject] = {
    # Workers with 2/3 and 1/3 of the rows.
    "dense, uneven": replace(
        plain(dense(), dense(), OUT, optimizer=LARGE_RATE), shards=[slice(0, 30), slice(30, 45)]
    ),
    "dense, Adam": plain(dense(), dense(), OUT, optimizer=OPTIMIZERS["Adam"], metrics=["accuracy"]),
    "several buckets": plain(
        dense(),
        dense(),
        OUT,
        optimizer=LARGE_RATE,
        settings={"exchange": Exchange(bucket_mb=1e-5)},
    ),
    "convolution": MODELS["convolution and batch normalization"],
    "recurrent": MODELS["LSTM"],
    "embedding": MODELS["embedding"],
    "dropout": plain(dense(), lambda: models.layers.Dropout(0.3), dense(), OUT),
    "bfloat16": replace(MODELS["mixed_bfloat16, SGD"], is_half=True),
    "float64": MODELS["float64, Adam"],
    "XLA": MODELS["XLA"],
    "accumulation": plain(dense(), OUT, optimizer=OPTIMIZERS["accumulation"]),
    "own train_step": Subject(
        models.built(models.OwnStep, optimizer=LARGE_RATE), (models.X, models.Y)
    ),
    "counts": MODELS["vector quantization with counts"],
    "compression": MODELS["compression"],
    "shards of the optimizer": Subject(
        stack(dense(), dense(), OUT, optimizer=OPTIMIZERS["SGD momentum"]),
        (models.X, models.Y),
        settings={"exchange": Exchange(shard_optimizer=True)},
    ),
}
USUAL = (
    "dense, uneven",
    "dense, Adam",
    "several buckets",
    "convolution",
    "recurrent",
    "dropout",
    "bfloat16",
    "float64",
    "XLA",
    "own train_step",
)
SOME = ("dense, uneven", "several buckets", "dropout", "bfloat16", "XLA")
FEW = ("dense, uneven", "dense, Adam", "dropout", "float64")

# --- the exchange ---


def changing_means(change: Callable[[Any, FlatExchange], None]) -> list[Change]:
    """Return changes that alter the means on all workers, in place."""

    def make(mean: Any) -> Any:
        def faulty(self: FlatExchange, flat: Any, nominal: float) -> Any:
            change(flat, self)
            return mean(self, flat, nominal)

        return faulty

    return [(FlatExchange, "_mean", make)]


def scaled(size: float, rank: int) -> list[Change]:
    def change(flat: Any, exchange: FlatExchange) -> None:
        flat[:-TAIL] *= flat.dtype.type(1 + size)

    return changing_means(change)


def zeroed(size: float, rank: int) -> list[Change]:
    """The last layers' bucket, or a part of it, is lost."""

    def change(flat: Any, exchange: FlatExchange) -> None:
        for number in exchange.layout.buckets[0][:2]:
            flat[exchange.layout.spans[number]] *= flat.dtype.type(1 - size)

    return changing_means(change)


def stale(size: float, rank: int) -> list[Change]:
    """The first layers' bucket is that of the step before."""
    last: dict[int, Any] = {}

    def change(flat: Any, exchange: FlatExchange) -> None:
        for number in exchange.layout.buckets[-1][-2:]:
            part = flat[exchange.layout.spans[number]]
            own, before = part.copy(), last.get(number, part)
            part[:] = (1 - size) * own + size * before
            last[number] = own

    return changing_means(change)


def swapped(size: float, rank: int) -> list[Change]:
    """Two gradients of the same number of elements are exchanged; else one is in reverse order."""

    def change(flat: Any, exchange: FlatExchange) -> None:
        spans = exchange.layout.spans
        sizes = [part.stop - part.start for part in spans]
        pairs = [
            (a, b) for a in range(len(sizes)) for b in range(a) if sizes[a] == sizes[b] and sizes[a]
        ]
        first, second = pairs[0] if pairs else (int(np.argmax(sizes)),) * 2
        one, other = flat[spans[first]], flat[spans[second]]
        old, new = one.copy(), other.copy()[:: 1 if pairs else -1]
        one[:] = (1 - size) * old + size * new
        if pairs:
            other[:] = (1 - size) * new + size * old

    return changing_means(change)


def noisy(size: float, rank: int) -> list[Change]:
    """Each number has an error of its own, the same on all workers."""

    def change(flat: Any, exchange: FlatExchange) -> None:
        errors = np.random.default_rng(3).standard_normal(flat.size - TAIL)
        flat[:-TAIL] *= (1 + size * errors).astype(flat.dtype)

    return changing_means(change)


def dropped(size: float, rank: int) -> list[Change]:
    """The second worker's gradients do not arrive; its rows are counted."""

    def make(terms: Any) -> Any:
        def faulty(self: FlatExchange, flat: Any, bucket: int, factor: float, arrays: Any) -> Any:
            return terms(self, flat, bucket, factor * (1 - size) if rank == 1 else factor, arrays)

        return faulty

    return [(FlatExchange, "_terms", make)]


def delayed(size: float, rank: int) -> list[Change]:
    """The second worker sends the gradients of its step before."""
    last: dict[Any, Any] = {}

    def make(terms: Any) -> Any:
        def faulty(self: FlatExchange, flat: Any, bucket: int, factor: float, arrays: Any) -> Any:
            sent = list(arrays)
            if rank == 1:
                before = last.get((id(self), bucket), sent)
                last[id(self), bucket] = [np.array(a) for a in sent]
                sent = [((1 - size) * a + size * b).astype(a.dtype) for a, b in zip(sent, before)]  # noqa: B905
            return terms(self, flat, bucket, factor, sent)

        return faulty

    return [(FlatExchange, "_terms", make)]


def unweighted(size: float, rank: int) -> list[Change]:
    """The workers' means count the same, whatever their rows."""

    def make(weigh: Any) -> Any:
        def faulty(self: GradientExchange, rows: Any) -> Any:
            weight, loss = weigh(self, rows)
            return tf.cast(weight, tf.float32) ** (1 - size), loss

        return faulty

    return [(GradientExchange, "weigh_step", make)]


def miscounted(size: float, rank: int) -> list[Change]:
    """The second worker reports too many rows."""

    def make(weigh: Any) -> Any:
        def faulty(self: GradientExchange, rows: Any) -> Any:
            weight, loss = weigh(self, rows)
            return tf.cast(weight, tf.float32) * (1 + size * (rank == 1)), loss

        return faulty

    return [(GradientExchange, "weigh_step", make)]


def sparse_dropped(size: float, rank: int) -> list[Change]:
    """The first rows of an embedding's gradients are lost."""

    def make(gather: Any) -> Any:
        def faulty(*arguments: Any) -> Any:
            indices, values = gather(*arguments)
            values = np.array(values)
            values[: int(np.ceil(size * len(values)))] = 0
            return indices, values

        return faulty

    return [(transports, "gather_slices", make)]


def sparse_misplaced(size: float, rank: int) -> list[Change]:
    """The first rows of an embedding's gradients belong to other rows of the table."""

    def make(gather: Any) -> Any:
        def faulty(*arguments: Any) -> Any:
            indices, values = gather(*arguments)
            indices = np.array(indices)
            count = int(np.ceil(size * len(indices)))
            indices[:count] = np.roll(indices, 1)[:count]
            return indices, values

        return faulty

    return [(transports, "gather_slices", make)]


def compressed(size: float, rank: int) -> list[Change]:
    """The sum of compressed gradients is wrong; that of others is right."""

    def make(add_up: Any) -> Any:
        def faulty(self: FlatExchange, flat: Any, bucket: int) -> None:
            add_up(self, flat, bucket)
            if self._codecs[bucket] is not None:
                flat[:-TAIL] *= flat.dtype.type(1 + size)

        return faulty

    return [(FlatExchange, "_sum", make)]


# --- the traced step only ---


def when_traced(change: Callable[[list[Any]], list[Any]]) -> list[Change]:
    """Return changes of the mean gradients in a traced step; a repeated step is right."""

    def make(average: Any) -> Any:
        def faulty(self: GradientExchange, *arguments: Any, **options: Any) -> Any:
            means = average(self, *arguments, **options)
            return means if tf.executing_eagerly() else change(means)

        return faulty

    return [(GradientExchange, "average", make)]


def traced_scaled(size: float, rank: int) -> list[Change]:
    def multiply(mean: Any) -> Any:
        if isinstance(mean, tf.IndexedSlices):
            return tf.IndexedSlices(mean.values * (1 + size), mean.indices, mean.dense_shape)
        return mean if mean is None else mean * tf.cast(1 + size, mean.dtype)

    return when_traced(lambda means: [multiply(mean) for mean in means])


def traced_unmoved(size: float, rank: int) -> list[Change]:
    """The first dense weight with a gradient does not move, or less."""

    def change(means: list[Any]) -> list[Any]:
        first = next(n for n, mean in enumerate(means) if isinstance(mean, tf.Tensor))
        slower = means[first] * tf.cast(1 - size, means[first].dtype)
        return [slower if n == first else mean for n, mean in enumerate(means)]

    return when_traced(change)


def traced_stale(size: float, rank: int) -> list[Change]:
    """Each dense gradient is that of the step before."""

    def change(means: list[Any]) -> list[Any]:
        found = []
        for mean in means:
            if not isinstance(mean, tf.Tensor):
                found.append(mean)
                continue
            last: list[Any] = []

            def mix(own: Any, last: list[Any] = last) -> Any:
                before = last.pop() if last else own
                last.append(np.array(own))
                return ((1 - size) * own + size * before).astype(own.dtype)

            found.append(tf.ensure_shape(tf.numpy_function(mix, [mean], mean.dtype), mean.shape))
        return found

    return when_traced(change)


# --- rows ---


def moving_rows(
    change: Callable[[Any, Any], Any], size: float, rank: int, ranks: Sequence[int], is_read: bool
) -> list[Change]:
    """Return changes of the rows that workers train on.

    Parameters
    ----------
    change
        Returns other rows of an epoch, given the right ones and a generator.
    is_read
        True if only training reads wrong rows: who asks for the rows of a step gets the right ones.
    """
    asked: list[int] = []  # threads that ask; another one reads ahead

    def make(between: Any) -> Any:
        def faulty(self: Visits, first: int, last: int, epoch: int) -> Any:
            if rank not in ranks or (is_read and threading.get_ident() in asked):
                return between(self, first, last, epoch)
            rows = np.array(between(self, 0, self.rows, epoch))
            return change(rows, np.random.default_rng(epoch))[first:last]

        return faulty

    def make_reading(read_step: Any) -> Any:
        def exact(self: RowBatches, step: int) -> Any:
            asked.append(threading.get_ident())
            try:
                return read_step(self, step)
            finally:
                asked.pop()

        return exact

    changes: list[Change] = [(Visits, "between", make)]
    return [*changes, (RowBatches, "read_step", make_reading)] if is_read else changes


def twice(size: float, rank: int, is_read: bool = True) -> list[Change]:
    """Some rows of the second worker are read twice, and others never."""

    def change(rows: Any, generator: Any) -> Any:
        count = max(1, int(size * len(rows) / 2))
        rows[:count] = rows[-count:]
        return rows

    return moving_rows(change, size, rank, [1], is_read)


def shifted(size: float, rank: int, is_read: bool = True) -> list[Change]:
    """Both workers read rows of another step."""

    def change(rows: Any, generator: Any) -> Any:
        return np.roll(rows, max(1, int(size * len(rows) / 2)))

    return moving_rows(change, size, rank, [0, 1], is_read)


def reordered(size: float, rank: int, is_read: bool = True) -> list[Change]:
    """The second worker reads its rows in another order."""

    def change(rows: Any, generator: Any) -> Any:
        count = max(2, int(size * len(rows)))
        chosen = generator.permutation(len(rows))[:count]
        rows[np.sort(chosen)] = rows[chosen]
        return rows

    return moving_rows(change, size, rank, [1], is_read)


def in_order(fault: Callable[..., list[Change]]) -> Callable[[float, int], list[Change]]:
    """Return a fault of the order itself, which who asks for the rows of a step also gets."""
    return lambda size, rank: fault(size, rank, is_read=False)


# --- metrics at the end of an epoch ---


def unmerged(size: float, rank: int) -> list[Change]:
    """Each worker reports the metrics of its own rows."""

    def make(combine: Any) -> Any:
        def faulty(model: Any, logs: Any, *arguments: Any, **options: Any) -> Any:
            local = {name: float(np.mean(value)) for name, value in logs.items()}
            merged = combine(model, logs, *arguments, **options)
            return {
                name: (1 - size) * value + size * local.get(name, value)
                for name, value in merged.items()
            }

        return faulty

    return [(sync, "combine_logs", make)]


def misweighted_loss(size: float, rank: int) -> list[Change]:
    """The second worker's loss counts more."""

    def make(add_up: Any) -> Any:
        def faulty(model: Any, *arguments: Any) -> Any:
            totals = [v for v in model.metrics_variables if v.path.startswith("loss")][:1]
            for variable in totals if rank == 1 else []:
                variable.assign(variable * (1 + size))
            return add_up(model, *arguments)

        return faulty

    return [(metrics, "_sum_metrics", make)]


# --- the start ---


def other_weights(size: float, rank: int) -> list[Change]:
    """The second worker begins with other weights."""

    def make(share: Any) -> Any:
        def faulty(self: Lifecycle, replica: Any) -> None:
            share(self, replica)
            if rank == 1:
                for variable in replica.model.trainable_variables:
                    variable.assign(variable * (1 + size) + 0.1 * size)

        return faulty

    return [(Lifecycle, "share_state", make)]


def other_state(size: float, rank: int) -> list[Change]:
    """The second worker's optimizer begins with other moments."""

    def make(share: Any) -> Any:
        def faulty(self: Lifecycle, replica: Any) -> None:
            share(self, replica)
            for variable in replica.model.optimizer.variables:
                if rank == 1 and len(variable.shape):
                    variable.assign(variable + 0.1 * size)

        return faulty

    return [(Lifecycle, "share_state", make)]


# --- state without an optimizer ---


def own_statistics(size: float, rank: int) -> list[Change]:
    """The moving statistics of normalization count the first worker's rows alone."""

    def make(agree: Any) -> Any:
        def faulty(self: EpochSync) -> None:
            share = self._batches.share
            other = 1.0 if rank == 0 else 0.0
            self._batches.share = lambda: (1 - size) * share() + size * other
            try:
                agree(self)
            finally:
                del self._batches.share

        return faulty

    return [(EpochSync, "agree_on_statistics", make)]


def misjudged_state(size: float, rank: int) -> list[Change]:
    """The state that layers count is averaged with wrong weights."""

    def make(average: Any) -> Any:
        def faulty(self: EpochSync) -> None:
            rows_at = self._batches.rows_at
            self._batches.rows_at = lambda step: rows_at(step) * np.array([1.0, 1 + size])
            try:
                average(self)
            finally:
                del self._batches.rows_at

        return faulty

    return [(EpochSync, "_average_own_state", make)]


# --- the optimizer's state in parts ---


def foreign_part(size: float, rank: int) -> list[Change]:
    """The second worker updates its part of the weights with wrong gradients."""

    def make(apply: Any) -> Any:
        def faulty(self: ShardedUpdate, optimize: Any, means: Any, *arguments: Any) -> None:
            found = means
            if rank == 1:
                found = [mean if mean is None else mean * (1 + size) for mean in means]
            apply(self, optimize, found, *arguments)

        return faulty

    return [(ShardedUpdate, "apply", make)]


@dataclass(frozen=True)
class Kind:
    """A fault, its sizes, and the subjects that it is tested on."""

    changes: Callable[[float, int], list[Change]]
    sizes: tuple[float, ...]
    subjects: tuple[str, ...]
    is_of_history: bool = False
    """True if the weights are right, and values of the history are wrong."""


KINDS: dict[str, Kind] = {
    "gradients scaled": Kind(scaled, (1.0, 0.01, 0.001), USUAL),
    "gradients with errors": Kind(noisy, (0.3, 0.003), USUAL),
    "a worker dropped": Kind(dropped, (1.0, 0.01), USUAL),
    "a worker delayed": Kind(delayed, (1.0, 0.03), FEW),
    "workers not weighted": Kind(unweighted, (1.0, 0.1), ("dense, uneven",)),
    "rows miscounted": Kind(miscounted, (1.0, 0.05), FEW),
    "a bucket of zeros": Kind(zeroed, (1.0, 0.03), SOME),
    "a stale bucket": Kind(stale, (1.0, 0.03), SOME),
    "gradients swapped": Kind(swapped, (1.0, 0.03), SOME),
    "sparse rows dropped": Kind(sparse_dropped, (1.0, 0.3, 0.02), ("embedding",)),
    "sparse rows misplaced": Kind(sparse_misplaced, (1.0, 0.3, 0.02), ("embedding",)),
    "accumulated gradients scaled": Kind(scaled, (1.0, 0.01), ("accumulation",)),
    "a compressed sum": Kind(compressed, (1.0, 0.1), ("compression",)),
    "traced: gradients scaled": Kind(
        traced_scaled, (1.0, 0.01), (*SOME, "embedding", "own train_step")
    ),
    "traced: a kernel unmoved": Kind(
        traced_unmoved, (1.0, 0.1), (*SOME, "dense, Adam", "accumulation")
    ),
    "traced: stale gradients": Kind(traced_stale, (1.0, 0.1), SOME),
    "read: rows twice": Kind(twice, (0.6, 0.01), FEW),
    "read: rows of another step": Kind(shifted, (1.0, 0.01), FEW),
    "read: another order": Kind(reordered, (1.0, 0.2), FEW),
    "order: rows twice": Kind(in_order(twice), (0.6, 0.01), FEW),
    "order: rows of another step": Kind(in_order(shifted), (1.0,), FEW),
    "order: another order": Kind(in_order(reordered), (1.0,), FEW),
    "metrics not merged": Kind(unmerged, (1.0, 0.1), ("dense, Adam", "dense, uneven"), True),
    "loss misweighted": Kind(misweighted_loss, (1.0, 0.1), ("dense, Adam",), True),
    "another start": Kind(other_weights, (1.0, 0.01, 0.001), FEW),
    "another optimizer's state": Kind(
        other_state, (1.0, 0.01), ("dense, uneven", "dense, Adam", "float64")
    ),
    "statistics of one worker": Kind(own_statistics, (1.0, 0.1), ("convolution",)),
    "counts with wrong weights": Kind(misjudged_state, (1.0, 0.1), ("counts",)),
    "a part of another worker": Kind(foreign_part, (1.0, 0.1, 0.01), ("shards of the optimizer",)),
}
FAULTS: dict[str, Subject] = {
    f"{name} {size:g}, {subject}": replace(SUBJECTS[subject], fault=Fault(name, kind.changes, size))
    for name, kind in KINDS.items()
    for subject in kind.subjects
    for size in kind.sizes
}
REFERENCES = {
    f"{name} {size:g}, {subject}": subject
    for name, kind in KINDS.items()
    for subject in kind.subjects
    for size in kind.sizes
}
