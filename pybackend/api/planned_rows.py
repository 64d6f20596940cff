"""Which rows each worker of a training will get, as far as that is known before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pybackend.api.data_checks import HELD_AS_COLUMNS
from pybackend.data.arrays import count_rows
from pybackend.data.dataframe import DataFrameRows
from pybackend.data.datasets import Batches
from pybackend.data.frames import FrameRows
from pybackend.data.sharding import count_dealt, count_steps
from pybackend.data.sources import FileRows, FunctionRows
from pybackend.job.arguments import counted
from pybackend.job.job import TrainingJob
from pybackend.job.roles import place_of


@dataclass(frozen=True)
class PlannedRows:
    """What is known of a data set.

    Attributes
    ----------
    what
        The data, in words.
    rows
        Of all workers together; None: not known yet.
    counts
        Rows of each worker in an epoch, by rank; None: not known yet.
    steps
        Of an epoch.
    which
        Which rows each worker gets, in words.
    later
        What is known only when the training starts, in sentences.
    """

    what: str
    rows: int | None = None
    counts: tuple[int, ...] | None = None
    steps: int | None = None
    which: str = ""
    later: tuple[str, ...] = ()


def plan_rows(data: Any, job: TrainingJob) -> PlannedRows:
    """How the rows of a training are shared out; ``data`` is in the form that launchers take."""
    what = describe_data(data)
    if isinstance(data, DataFrameRows):
        kept = not data.spec.repartition
        which = "the partitions of the DataFrame" if kept else "an equal share, at random"
        later = "the rows of the DataFrame, and the steps of an epoch: Spark counts them then"
        return PlannedRows(what, steps=job.steps_per_epoch, which=which, later=(later,))
    if isinstance(data, FunctionRows):
        which = "what the function returns there"
        later = "the rows and steps that the function gives on each worker"
        return PlannedRows(what, steps=job.steps_per_epoch, which=which, later=(later,))
    rows = _count(data)
    if job.strategy is not None:
        return _plan_asynchronous(what, rows, job)
    counts = tuple(count_dealt(rows, job.workers))
    steps = job.steps_per_epoch or count_steps(counts, job.batch_size)
    which = f"every {_ordinal(job.workers)} row, beginning with the one of its rank"
    if isinstance(data, Batches):
        steps = len(data.sizes)
        which = "its share of each batch"
    elif job.shuffle == "global":
        which = "all rows, and in each epoch another share of them"
    elif isinstance(data, FileRows):
        which = "ranges of rows, which it reads itself"
    if job.workers == 1:
        which = "all rows"
    changes = ("how many workers later epochs have",) if job.is_elastic else ()
    return PlannedRows(what, rows, counts, steps, which, changes)


def count_known(data: Any) -> int | None:
    """Rows of a data set of all workers together; None: not known before the start."""
    return None if isinstance(data, (DataFrameRows, FunctionRows)) else _count(data)


def describe_data(data: Any) -> str:
    """A data set in words."""
    if isinstance(data, DataFrameRows):
        return f"a Spark DataFrame, {_describe_columns(data)}"
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
    """What a process of a training is."""
    return place_of(job.roles, rank)[0] if job.strategy else "worker"


def _plan_asynchronous(what: str, rows: int, job: TrainingJob) -> PlannedRows:
    return PlannedRows(
        what,
        rows,
        which="rows that TensorFlow moves there; workers take steps as they are ready",
        steps=None,
        later=("how many steps each worker takes, and on which rows",),
    )


def _count(data: Any) -> int:
    if isinstance(data, FileRows):
        return data.rows
    return count_rows(data.columns if isinstance(data, HELD_AS_COLUMNS) else data)


def _describe_columns(data: Any) -> str:
    """Which columns become which tensors."""
    named = {"x": "inputs", "y": "labels", "sample_weight": "weights"}
    parts = []
    for group in data.column_groups:
        kind, _, name = group.key.partition("/")
        columns = list(group.columns)
        shown = ", ".join(columns[:4]) + (f", ... ({len(columns)})" if len(columns) > 4 else "")
        parts.append(f"{named[kind]}{f' {name}' if name else ''} {shown}")
    if data.left_out:
        parts.append(f"not used: {', '.join(data.left_out)}, which hold an index")
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
