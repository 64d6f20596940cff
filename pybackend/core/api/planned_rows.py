"""Rows of each worker of a training run, as far as known before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pybackend.core.api.data_checks import HELD_AS_COLUMNS
from pybackend.core.data.arrays import count_rows
from pybackend.core.data.dataframe import DataFrameRows
from pybackend.core.data.datasets import Batches
from pybackend.core.data.frames import FrameRows
from pybackend.core.data.sharding import count_sharded, count_steps
from pybackend.core.data.sources import FileRows, FunctionRows
from pybackend.core.job.arguments import counted
from pybackend.core.job.job import TrainingJob
from pybackend.core.tf_config import find_role
from pybackend.core.words import term


@dataclass(frozen=True)
class PlannedRows:
    """Known properties of a data set.

    Attributes
    ----------
    what
        Description of the data.
    rows
        Rows of all workers together; None: not known yet.
    counts
        Rows of each worker in an epoch, by rank; None: not known yet.
    steps
        Steps of an epoch.
    which
        Description of the rows that each worker gets.
    later
        Sentences about what is known only when the training starts.
    """

    what: str
    rows: int | None = None
    counts: tuple[int, ...] | None = None
    steps: int | None = None
    which: str = ""
    later: tuple[str, ...] = ()


def plan_rows(data: Any, job: TrainingJob) -> PlannedRows:
    """Describe how a training run's rows are distributed; ``data`` is as launchers take it."""
    what = describe_data(data)
    if isinstance(data, DataFrameRows):
        which = "an equal share, at random"
        if not data.spec.repartition:
            which = f"the partitions of the {term('DataFrame')}"
        later = (
            f"the rows of the {term('DataFrame')} and the steps per epoch: Spark counts them at "
            "the start"
        )
        return PlannedRows(what, steps=job.steps_per_epoch, which=which, later=(later,))
    if isinstance(data, FunctionRows):
        which = "what the function returns on that worker"
        later = "the number of rows and steps that the function returns on each worker"
        return PlannedRows(what, steps=job.steps_per_epoch, which=which, later=(later,))
    rows = _count(data)
    if job.is_asynchronous:
        return _plan_asynchronous(what, rows, job)
    counts = tuple(count_sharded(rows, job.workers))
    steps = job.steps_per_epoch or count_steps(counts, job.batch_size)
    which = f"every {_ordinal(job.workers)} row, starting with the row of its rank"
    if isinstance(data, Batches):
        steps = job.steps_per_epoch or len(data.sizes)
        which = "its share of each batch"
    elif job.shuffle == "global":
        which = "all rows, and trains on a different share of them in each epoch"
    elif isinstance(data, FileRows) and (job.shuffle or not data.spec.repartition):
        which = "ranges of rows, which it reads itself"
    if job.workers == 1:
        which = "all rows"
    changes = ("how many workers later epochs have",) if job.is_elastic else ()
    return PlannedRows(what, rows, counts, steps, which, changes)


def count_known(data: Any) -> int | None:
    """Return the number of rows of all workers together; None: not known before the start."""
    return None if isinstance(data, (DataFrameRows, FunctionRows)) else _count(data)


def describe_data(data: Any) -> str:
    """Describe a data set."""
    if isinstance(data, DataFrameRows):
        return f"a {term('Spark DataFrame')}, {_describe_columns(data)}"
    if isinstance(data, FunctionRows):
        return f"what {getattr(data.fn, '__name__', 'a function')}(context) returns"
    if isinstance(data, FileRows):
        listed = counted(len(data.files.files), "file")
        return f"{listed} of {counted(data.rows, 'row')}, {_describe_columns(data)}"
    if isinstance(data, Batches):
        tensors = _describe_tensors(data.columns)
        rows = counted(_count(data), "row")
        return f"{len(data.sizes)} batches of a data set, {rows}: {tensors}"
    if isinstance(data, FrameRows):
        return f"a data frame of {counted(_count(data), 'row')}, {_describe_columns(data)}"
    return f"arrays of {counted(_count(data), 'row')}: {_describe_tensors(data)}"


def role_of(job: TrainingJob, rank: int) -> str:
    """Return the role of a process of a training run."""
    return find_role(job.roles, rank)[0] if job.is_asynchronous else "worker"


def _plan_asynchronous(what: str, rows: int, job: TrainingJob) -> PlannedRows:
    return PlannedRows(
        what,
        rows,
        which="rows that TensorFlow sends to it; workers take steps as soon as they are ready",
        steps=None,
        later=("how many steps each worker takes, and on which rows",),
    )


def _count(data: Any) -> int:
    if isinstance(data, FileRows):
        return data.rows
    return count_rows(data.columns if isinstance(data, HELD_AS_COLUMNS) else data)


def _describe_columns(data: Any) -> str:
    """Describe how columns map to tensors."""
    named = {"x": "inputs", "y": "labels", "sample_weight": "weights"}
    parts = []
    for group in data.column_groups:
        kind, _, name = group.key.partition("/")
        columns = list(group.columns)
        shown = ", ".join(columns[:4]) + (f", ... ({len(columns)})" if len(columns) > 4 else "")
        parts.append(f"{named[kind]}{f' {name}' if name else ''} {shown}")
    if data.left_out:
        parts.append(f"not used: {', '.join(data.left_out)}, which contain an index")
    return "; ".join(parts)


def _describe_tensors(columns: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_describe_rows(array)}" for key, array in columns.items())


def _describe_rows(array: Any) -> str:
    shape: Sequence[int] | None = getattr(array, "shape", None)
    if shape is None:
        return "of text or of any length"
    return f"{array.dtype} {tuple(shape[1:])}"


def _ordinal(number: int) -> str:
    if 10 <= number % 100 <= 20:
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
