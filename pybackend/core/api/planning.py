"""Show what a training run would start, without starting it."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Unpack

from pybackend.core.api.call_data import count_data
from pybackend.core.api.calls import Target, TrainingCall, explain_arguments, take_options
from pybackend.core.api.markup import NOTEBOOK
from pybackend.core.api.prepared_training import PreparedTraining, prepare_training
from pybackend.core.api.rendering import list_set, write_settings
from pybackend.core.api.submit import check_submission
from pybackend.core.data.batches import Batches
from pybackend.core.data.frames import FrameRows
from pybackend.core.data.sharding import count_sharded, count_steps
from pybackend.core.data.sources import FileRows, FunctionRows
from pybackend.core.data.spark_rows import DataFrameRows
from pybackend.core.job.arguments import counted
from pybackend.core.job.call_options import PathOrUri, TrainingOptions
from pybackend.core.job.job import TrainingJob
from pybackend.core.launchers import Describing, Submission
from pybackend.core.tf_config import find_role
from pybackend.core.words import term

# Number of workers that are printed; `Plan.workers` has all.
_LISTED = 16


@dataclass(frozen=True)
class PlannedWorker:
    """A worker that a training run would start.

    Attributes
    ----------
    rank
        Rank of the worker, from 0.
    role
        ``"worker"``; with `ParameterServer` also ``"chief"`` or ``"ps"``.
    place
        Description of where the worker would run.
    rows
        Number of rows of the training data for this worker. None: not known yet.
    """

    rank: int
    role: str
    place: str
    rows: int | None


@dataclass(frozen=True)
class Plan:
    """Description of a training run that was not started, as returned by `plan`.

    Attributes
    ----------
    launcher
        Description of the launcher.
    workers
        A `PlannedWorker` for each rank.
    data, validation_data
        Description of the rows. None: no validation data.
    rows, steps_per_epoch
        Totals over all workers. None: not known yet.
    which_rows
        Description of the rows that each worker would get.
    model
        Description of how the model would be sent to the workers.
    settings
        As in `TrainResult`; ``seed`` is None if none was passed.
    documents
        Maps file names to the text that would be submitted to a cluster: Kubernetes manifests as
        JSON, or Slurm's batch script.
    later
        Sentences about what is known only after training has started.
    driver
        With ``submit``, description of the process that would drive the training: its host, and the
        folder of its job. None: this session drives it.
    """

    launcher: str
    workers: tuple[PlannedWorker, ...]
    data: str
    validation_data: str | None
    rows: int | None
    steps_per_epoch: int | None
    which_rows: str
    model: str
    settings: dict[str, Any] = field(repr=False)
    documents: dict[str, str] = field(default_factory=dict, repr=False)
    later: tuple[str, ...] = ()
    driver: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as lists, dicts, strings, numbers and None, for ``json.dumps``."""
        plain = asdict(self)
        return {**plain, "workers": list(plain["workers"]), "later": list(self.later)}

    def __str__(self) -> str:
        parts = {
            "workers": self._describe_workers(),
            "settings": [f"{name}: {text}" for name, text in list_set(self.settings)],
            "known only when it starts": self.later,
            **{name: text.splitlines() for name, text in self.documents.items()},
        }
        lines = [self._title, *self._facts]
        for name, part in parts.items():
            lines += [f"{name}:", *(f"  {line}".rstrip() for line in part)] if part else []
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows: list[tuple[Any, ...]] = [
            (one.rank, one.role, one.place, "not known yet" if one.rows is None else one.rows)
            for one in self.workers[:_LISTED]
        ]
        rows += [("...", "", f"{self._unlisted} more", "")] if self._unlisted else []
        later = ["known only when it starts", *self.later] if self.later else []
        return NOTEBOOK.element(
            "div",
            NOTEBOOK.lines([self._title, *self._facts]),
            NOTEBOOK.table(("rank", "role", "where", "rows"), rows),
            NOTEBOOK.lines(later),
            write_settings(self.settings),
            *(NOTEBOOK.folded(name, NOTEBOOK.code(text)) for name, text in self.documents.items()),
            kind="block",
        )

    @property
    def _title(self) -> str:
        processes = "1 process" if len(self.workers) == 1 else f"{len(self.workers)} processes"
        return f"nothing was started: a training run with {processes}, {self.launcher}"

    @property
    def _facts(self) -> list[str]:
        facts = [] if self.driver is None else [f"driver: {self.driver}"]
        facts.append(f"data: {self.data}")
        if self.validation_data is not None:
            facts.append(f"validation data: {self.validation_data}")
        facts.append(f"each worker gets: {self.which_rows}")
        if self.steps_per_epoch is not None:
            size = counted(self.settings["batch_size"], "row")
            facts.append(f"steps per epoch: {self.steps_per_epoch}, of {size} per worker")
        return [*facts, f"model: {self.model}"]

    @property
    def _unlisted(self) -> int:
        return max(0, len(self.workers) - _LISTED)

    def _describe_workers(self) -> list[str]:
        lines = [
            f"{one.role} {one.rank}: {one.place}"
            + ("" if one.rows is None else f", {counted(one.rows, 'row')}")
            for one in self.workers[:_LISTED]
        ]
        return [*lines, f"... and {self._unlisted} more"] if self._unlisted else lines


@explain_arguments
@take_options
def plan(
    spark: Target,
    model: Any,
    data: Any,
    *,
    submit: bool | PathOrUri = False,
    **options: Unpack[TrainingOptions],
) -> Plan:
    """Show which workers and rows `barrier_train` would use, without starting anything.

    This runs all the checks that `barrier_train` runs before it starts. No process is started.
    Spark runs only the jobs that `barrier_train` needs beforehand: to find the values of a text
    label and of encoded features, unless ``data_options`` lists their ``categories``. A data set of
    batches is read, files are opened to count their rows, and a Spark session is queried for its
    slots.

    Parameters
    ----------
    spark, model, data
        As in `barrier_train`.
    submit
        True, or the ``folder`` of `submit_training`: plan a training that is handed over.

    Returns
    -------
    Plan
        Print it, or show it in a notebook. ``to_dict()`` returns plain data.

    Raises
    ------
    InputError, ClusterError, SerializationError
        The errors that `barrier_train` raises before it starts anything.

    Examples
    --------
    >>> import numpy as np, pybackend
    >>> x, y = np.zeros((100, 4)), np.zeros(100)
    >>> print(pybackend.plan("local", model, (x, y), workers=2))  # doctest: +SKIP
    """
    call = TrainingCall(spark=spark, model=model, data=data, options=options)
    if submit is False:
        return describe_plan(prepare_training(call, starts_workers=False))
    root = check_submission(call, None if submit is True else submit)
    made = describe_plan(prepare_training(call, starts_workers=False))
    driver = f"a process of its own on {socket.gethostname()}, with a new folder in {root.path}"
    return replace(made, driver=f"{driver} and a copy in {root}" if root.copies else driver)


def describe_plan(prepared: PreparedTraining) -> Plan:
    job, launcher = prepared.job, prepared.launcher
    validation = prepared.datasets.get("validation")
    planned = plan_rows(prepared.datasets["train"], job)
    found = Submission(("not known yet",) * job.workers)
    if isinstance(launcher, Describing):
        found = launcher.describe(job)
    counts = planned.counts or (None,) * job.workers
    roles = [find_role(job.roles, rank)[0] for rank in range(job.workers)]
    return Plan(
        launcher=launcher.where,
        workers=tuple(map(PlannedWorker, range(job.workers), roles, found.places, counts)),
        data=planned.what,
        validation_data=None if validation is None else describe_data(validation),
        rows=planned.rows,
        steps_per_epoch=planned.steps,
        which_rows=planned.which,
        model=prepared.describe_model(),
        settings={**prepared.settings, "seed": job.seed if job.is_seeded else None},
        documents=dict(found.documents),
        later=(*planned.later, *found.later, *_list_choices(job)),
    )


def _list_choices(job: TrainingJob) -> list[str]:
    """List what is decided only when the training starts."""
    found = [] if job.is_seeded else ["the seed, drawn at random: pass `seed` to repeat the run"]
    if job.workers > 1 and not job.is_asynchronous:
        found.append("which metrics the workers can sum: they check this on some rows")
    return found


@dataclass(frozen=True)
class PlannedRows:
    """Known properties of a data set; ``what`` and ``which`` rows each worker gets are in words.

    ``rows`` of all workers together, the ``counts`` of each worker in an epoch, by rank, and the
    ``steps`` of an epoch are None if they are not known yet. ``later`` has sentences about what is
    known only when the training starts.
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
        frame = term("DataFrame")
        is_even = data.spec.repartition
        which = "an equal share, at random" if is_even else f"the partitions of the {frame}"
        later = f"the rows of the {frame} and the steps per epoch: Spark counts them at the start"
        return PlannedRows(what, steps=job.steps_per_epoch, which=which, later=(later,))
    if isinstance(data, FunctionRows):
        which = "what the function returns on that worker"
        later = "the number of rows and steps that the function returns on each worker"
        return PlannedRows(what, steps=job.steps_per_epoch, which=which, later=(later,))
    rows = count_data(data)
    if job.is_asynchronous:
        which = "rows that TensorFlow sends to it; workers take steps as soon as they are ready"
        later = "how many steps each worker takes, and on which rows"
        return PlannedRows(what, rows, which=which, later=(later,))
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


def describe_data(data: Any) -> str:
    if isinstance(data, DataFrameRows):
        return f"a {term('Spark DataFrame')}, {_describe_columns(data)}"
    if isinstance(data, FunctionRows):
        return f"what {getattr(data.fn, '__name__', 'a function')}(context) returns"
    if isinstance(data, FileRows):
        listed = counted(len(data.files.files), "file")
        return f"{listed} of {counted(data.rows, 'row')}, {_describe_columns(data)}"
    if isinstance(data, Batches):
        tensors = _describe_tensors(data.columns)
        rows = counted(count_data(data), "row")
        return f"{len(data.sizes)} batches of a data set, {rows}: {tensors}"
    if isinstance(data, FrameRows):
        return f"a data frame of {counted(count_data(data), 'row')}, {_describe_columns(data)}"
    return f"arrays of {counted(count_data(data), 'row')}: {_describe_tensors(data)}"


def _describe_columns(data: Any) -> str:
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
    return "of text or of any length" if shape is None else f"{array.dtype} {tuple(shape[1:])}"


def _ordinal(number: int) -> str:
    if 10 <= number % 100 <= 20:
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"
