"""Train one worker, from the files of its job to its report and, on rank 0, the model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pybackend.core.collective import Collective, Mesh, all_gather_values
from pybackend.core.engine.fit import fit
from pybackend.core.engine.lifecycle import Lifecycle
from pybackend.core.engine.metrics import to_plain
from pybackend.core.engine.replica import Replica, make_replica
from pybackend.core.engine.resume import CheckpointedLifecycle
from pybackend.core.engine.save import write_model
from pybackend.core.engine.session_callbacks import make_tensorboard
from pybackend.core.engine.step_clock import StepClock
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.messages import Answers, Emit, Phase
from pybackend.core.job.report import Audit, StepTimes
from pybackend.core.job.storage_options import pointing_to
from pybackend.core.job.worker_options import Exchange
from pybackend.core.model.compare import hash_weights
from pybackend.core.model.transfer import LoadedModel, load_job_model
from pybackend.core.words import setting


@dataclass(frozen=True)
class Training:
    """Result of one worker's training; attributes as in `WorkerReport`.

    ``discard`` removes files that are not needed after the report.
    """

    history: dict[str, list[Any]]
    rows: int
    steps: int
    seconds: float
    weights_sha256: str
    model_sha256: str | None
    inputs: Any
    waited: float | None
    step_times: StepTimes | None = None
    audit: Audit | None = None
    discard: Callable[[], None] | None = None
    by_worker: tuple[int, ...] = ()


def train(
    job: TrainingJob,
    collective: Collective,
    counts: Mapping[str, list[int]],
    folder: Path,
    emit: Emit,
    stream: Any = None,
    lifecycle: Lifecycle | None = None,
    answers: Answers | None = None,
    sent: dict[str, Any] | None = None,
    loaded: LoadedModel | None = None,
) -> Training:
    """Train this worker's replica with the others.

    Parameters
    ----------
    counts
        Number of rows of every worker, by rank, for each data set in the folder.
    folder
        The worker's own folder, with ``train/``, ``validation/`` and the files of
        the model; rank 0 writes ``trained.h5`` or ``trained.keras`` into it.
    emit
        Called with an event per epoch.
    stream
        The ``tf.data.Dataset`` to train on, instead of rows in the folder.
    lifecycle
        Start of training, and the state that is saved; None: as the job's checkpoint options
        specify.
    answers
        Messages from observers of the training.
    sent
        As in `load_job_model`.
    loaded
        The model, in the state after the last generation; None: as the driver sent it.
    """
    if lifecycle is None:
        lifecycle = Lifecycle(job) if job.checkpoint is None else CheckpointedLifecycle(job)
    emit(Phase("loading the model"))
    loaded = loaded or load_job_model(job, folder, sent)
    replica = make_replica(job, collective, counts, folder, emit, loaded, stream, lifecycle.seed)
    lifecycle.begin(replica)
    tensorboard = make_tensorboard(job, folder, emit) if replica.rank == 0 else []
    began, waited = time.monotonic(), collective.waited
    clock = StepClock(replica.feed.arrivals)
    why = _explain_no_audit(job, collective)
    if why is not None and why not in lifecycle.audit.skipped:
        lifecycle.audit.skipped.append(why)  # earlier groups or runs may have been audited
    history, steps, auditor = fit(replica, lifecycle, clock, tensorboard, answers)
    seconds, waited = time.monotonic() - began, collective.waited - waited
    waited -= auditor.waited if auditor else 0.0
    is_timed = not job.needs_tensorflow_server
    step_times = clock.agree(collective, _read_costs(collective)) if is_timed else None
    if step_times is not None and isinstance(collective, Mesh):
        step_times = replace(step_times, route=collective.route)
    weights = hash_weights(replica.model)
    digest = _write_model(replica, lifecycle, folder, weights)
    return Training(
        history={name: [to_plain(v) for v in values] for name, values in history.items()},
        rows=replica.feed.rows,
        steps=steps,
        seconds=seconds,
        weights_sha256=weights,
        model_sha256=digest,
        inputs=replica.inputs,
        waited=waited if is_timed else None,
        step_times=step_times,
        audit=lifecycle.audit if replica.rank == 0 else None,
        discard=lifecycle.close(replica),
    )


def _explain_no_audit(job: TrainingJob, collective: Collective) -> str | None:
    """Return why no step of a training is compared with one process; None: steps are."""
    if not isinstance(job.exchange, Exchange):
        return "with `LocalSteps`, workers take steps of their own"
    if not job.is_audited:
        return f"`{setting(audit=False)}`"
    return "one worker is one process" if collective.world_size == 1 else None


def _write_model(replica: Replica, lifecycle: Lifecycle, folder: Path, weights: str) -> str | None:
    """Write the trained model on rank 0; return the file's digest."""
    job, plan = replica.job, replica.plan
    is_same = job.model_uri is None or _is_same_everywhere(replica.collective, weights)
    lifecycle.finish()
    # If the weights differ, the driver will report it, and an existing file stays unchanged.
    if plan is None or not is_same:
        return None
    with pointing_to(job.checkpoint):
        return write_model(replica.loaded, plan, folder, job.model_uri, replica.emit)


def _read_costs(collective: Collective) -> tuple[float, float, float] | None:
    if not isinstance(collective, Mesh):
        return None
    costs = collective.cost_model
    return costs.latency_seconds, costs.seconds_per_byte, costs.add_seconds_per_byte


def _is_same_everywhere(collective: Collective, digest: str) -> bool:
    return len(set(all_gather_values(collective, digest))) == 1
