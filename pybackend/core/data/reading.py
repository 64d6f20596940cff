"""Data that a worker reads in its own process: files, or the user's input function."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle
import keras
import tensorflow as tf

from pybackend.core.collective import Alone, Collective, all_gather_values
from pybackend.core.data.arrays import check_row_shapes, flatten, join_texts
from pybackend.core.data.batches import check_structure, count_batch
from pybackend.core.data.row_store import RowStoreWriter, check_layouts, read_layouts, unify_layout
from pybackend.core.data.sharding import count_sharded
from pybackend.core.data.sources import FunctionRows
from pybackend.core.errors import InputError
from pybackend.core.job.context import WorkerContext
from pybackend.core.job.job import SOURCE, Job, TrainingJob, argument_of
from pybackend.core.job.messages import Order
from pybackend.core.tf_config import make_tf_config

Counts = dict[str, list[int]]


@dataclass(frozen=True)
class Sources:
    """Data that a worker read itself."""

    names: tuple[str, ...] = ()  # data sets whose rows are now in the worker's row store
    # The ``tf.data.Dataset`` to train on, if the user's function returns one; it is not stored.
    stream: Any = None

    def __bool__(self) -> bool:
        return bool(self.names) or self.stream is not None

    def settle(self, job: Job, collective: Collective, folder: Path) -> Counts:
        """Make the layouts identical on all workers; return each rank's rows per epoch."""
        counts = {}
        for name in self.names:
            everyone = all_gather_values(collective, {name: read_layouts(folder)[name]})
            check_layouts(everyone)
            layouts = [of_rank[name] for of_rank in everyone]
            unify_layout(folder / name, layouts)
            counts[name] = [layout["rows"] for layout in layouts]
            if name == "train" and job.shuffles_globally:
                counts[name] = count_sharded(counts[name][0], job.workers)
        return counts


def read_sources(
    job: Job, rank: int, folder: Path, order: Order, calls: Mapping[str, FunctionRows] | None = None
) -> Sources:
    """Store the rows of all data sets that this worker reads itself.

    ``order`` is the launcher's, whose ``peers`` are the addresses of all workers. ``calls`` are
    the data sets that functions return, by name. Raises `InputError` if the rows, or the result of
    a function, are not valid.
    """
    names = []
    stream = None
    for path in sorted(folder.glob(f"*{SOURCE}")):
        name = path.name.removesuffix(SOURCE)
        # The launcher wrote it on this machine from the driver's objects.
        source = cloudpickle.loads(path.read_bytes())
        shared = job.is_elastic or (name == "train" and job.shuffles_globally)
        in_order = name == "train" and isinstance(job, TrainingJob) and not job.shuffle
        source.spool(folder / name, job.workers, rank, shared, in_order)
        names.append(name)
    for name, function in sorted((calls or {}).items()):
        # The function's random numbers should differ between workers.
        keras.utils.set_random_seed((job.seed + rank) % 2**32)
        context = WorkerContext(rank, job.workers, order.peers, make_tf_config(order.peers, rank))
        data = call_pipeline(function, context, argument_of(name))
        if name == "train" and job.kind == "train":
            stream = data
            continue
        _store_dataset(data, folder / name, argument_of(name))
        names.append(name)
    return Sources(tuple(names), stream)


def read_all_sources(job: Job, folder: Path) -> dict[str, int]:
    """Store all rows of the files that this worker reads itself; return their number by name."""
    sources = read_sources(job, 0, folder, Order("", ()))
    counts = sources.settle(replace(job, workers=1), Alone(), folder)
    return {name: rows for name, (rows,) in counts.items()}


def call_pipeline(source: FunctionRows, context: WorkerContext, name: str) -> Any:
    data = source.fn(context)
    if not isinstance(data, tf.data.Dataset):
        raise InputError(
            f"the `{name}` function returned {type(data).__name__}; expected a tf.data.Dataset of "
            f"batches, such as {_show_dataset(data)}"
        )
    what = f"the data set that the `{name}` function returned"
    check_structure(data.element_spec, what, wrong_ranks=(0, None))
    return data


def _show_dataset(data: Any) -> str:
    """Return the line that makes a data set of batches of what a function has returned."""
    is_loader = type(data).__module__.partition(".")[0] == "torch"
    if is_loader or isinstance(data, keras.utils.PyDataset | Iterator):
        batches = "(data[n] for n in range(len(data)))"
        if isinstance(data, Iterator):
            batches = "generate()"  # a new iterator for each epoch
        elif is_loader:
            batches = "((x.numpy(), y.numpy()) for x, y in loader)"
        shapes = "(tf.TensorSpec((None, 4)), tf.TensorSpec((None,)))"
        return f"tf.data.Dataset.from_generator(lambda: {batches}, output_signature={shapes})"
    return "tf.data.Dataset.from_tensor_slices((x, y)).batch(32)"


def _store_dataset(data: Any, folder: Path, argument: str) -> None:
    if int(data.cardinality()) == tf.data.INFINITE_CARDINALITY:
        raise InputError(f"the `{argument}` function returns infinite data: use .take()")
    first: dict[str, Any] = {}
    cure = ". Only training accepts such batches: call the trained model's `evaluate` on them"
    with RowStoreWriter(folder) as writer:
        for element in data.as_numpy_iterator():
            leaves = flatten(element)
            if count_batch(leaves, argument, cure):
                for key, leaf in leaves.items():
                    what = f"`{key}` of the data set that the `{argument}` function returned"
                    check_row_shapes((first.setdefault(key, leaf), leaf), what)
                writer.append({key: _to_storable(leaf, argument) for key, leaf in leaves.items()})


def _to_storable(leaf: Any, argument: str) -> Any:
    if leaf.dtype.kind != "O":
        return leaf
    if leaf.ndim > 2:
        raise InputError(
            f"the `{argument}` function must return one string or one list of strings per row"
        )
    return join_texts(leaf.reshape(-1).tolist(), len(leaf))
