"""Show what a training run would start, without starting it."""

from __future__ import annotations

import socket
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Unpack

from pybackend.core.api.calls import Target, TrainingCall, explain_arguments, take_options
from pybackend.core.api.markup import NOTEBOOK
from pybackend.core.api.planned_rows import describe_data, plan_rows, role_of
from pybackend.core.api.prepared_training import PreparedTraining, prepare_training
from pybackend.core.api.rendering import list_set, write_settings
from pybackend.core.api.submit import check_submission
from pybackend.core.job.arguments import counted
from pybackend.core.job.call_options import Place, TrainingOptions
from pybackend.core.job.job import TrainingJob
from pybackend.core.launchers import Describing, Submission

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
        lines = [
            self._title,
            *self._facts,
            "workers:",
            *(f"  {line}" for line in self._describe_workers()),
            "settings:",
            *(f"  {name}: {text}" for name, text in list_set(self.settings)),
        ]
        if self.later:
            lines += ["known only when it starts:", *(f"  {line}" for line in self.later)]
        for name, text in self.documents.items():
            lines += [f"{name}:", *(f"  {line}".rstrip() for line in text.splitlines())]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return HTML for notebooks."""
        rows: list[tuple[Any, ...]] = [
            (one.rank, one.role, one.place, "not known yet" if one.rows is None else one.rows)
            for one in self.workers[:_LISTED]
        ]
        rows += [("...", "", f"{self._unlisted} more", "")] if self._unlisted else []
        later = ["known only when it starts", *self.later] if self.later else []
        documents = self.documents.items()
        return NOTEBOOK.element(
            "div",
            NOTEBOOK.lines([self._title, *self._facts]),
            NOTEBOOK.table(("rank", "role", "where", "rows"), rows),
            NOTEBOOK.lines(later),
            write_settings(self.settings),
            *(NOTEBOOK.folded(name, NOTEBOOK.code(text)) for name, text in documents),
            kind="block",
        )

    @property
    def _title(self) -> str:
        count = len(self.workers)
        processes = "process" if count == 1 else "processes"
        return f"nothing was started: a training run with {count} {processes}, {self.launcher}"

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
    submit: bool | Place = False,
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
    root = None
    if submit is not False:
        root = check_submission(call, None if submit is True else submit)
    made = describe_plan(prepare_training(call))
    if root is None:
        return made
    driver = f"a process of its own on {socket.gethostname()}, with a new folder in {root.path}"
    return replace(made, driver=f"{driver} and a copy in {root}" if root.copies else driver)


def describe_plan(prepared: PreparedTraining) -> Plan:
    """Return the plan of a training run that is ready to start."""
    request, job, launcher = prepared.request, prepared.request.job, prepared.launcher
    validation = request.datasets.get("validation")
    planned = plan_rows(request.datasets["train"], job)
    found = Submission(("not known yet",) * job.workers)
    if isinstance(launcher, Describing):
        found = launcher.describe(job)
    counts = planned.counts or (None,) * job.workers
    return Plan(
        launcher=launcher.where,
        workers=tuple(
            PlannedWorker(rank, role_of(job, rank), place, count)
            for rank, (place, count) in enumerate(zip(found.places, counts, strict=True))
        ),
        data=planned.what,
        validation_data=None if validation is None else describe_data(validation),
        rows=planned.rows,
        steps_per_epoch=planned.steps,
        which_rows=planned.which,
        model=request.describe_model(),
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
