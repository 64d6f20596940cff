"""Training runs in scripts that `tfdist bench-scale` starts with different numbers of workers.

The script makes its usual call. A `ScaleOrder` in an environment variable sets the number of
workers, whether they share the batch, and the folder for the measurements.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pybackend.core.api.calls import TrainingCall
from pybackend.core.api.request import Request
from pybackend.core.api.result import TrainResult
from pybackend.core.data.datasets import Batches
from pybackend.core.data.sources import FunctionRows
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.arguments import check_whole_number
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.report import WorkerReport
from pybackend.core.job.storage_options import check_model_options, without_folder
from pybackend.core.job.worker_options import ParameterServer
from pybackend.core.words import term

VARIABLE = "TFDIST_BENCH_SCALE"
_FILE = "training.json"


@dataclass(frozen=True)
class ScaleOrder:
    """Settings of a training run that `tfdist bench-scale` runs.

    Attributes
    ----------
    workers
        Number of workers.
    is_shared
        True: they share one batch (strong scaling). False: each has its own (weak scaling).
    batch_size
        Number of rows in this batch. None: as in the script.
    steps
        Number of steps. None: as in the script.
    folder
        Folder for the measurements.
    """

    workers: int
    is_shared: bool
    batch_size: int | None
    steps: int | None
    folder: str


@dataclass(frozen=True)
class ScaledTraining:
    """Measurements of a training run.

    Attributes
    ----------
    rows
        Rows per step, over all workers.
    batch_size
        Rows in the batch that the workers share, or in each worker's own batch.
    reports
        Reports of all workers.
    """

    rows: float
    batch_size: int
    reports: list[WorkerReport]


def share_batch(batch_size: int, workers: int) -> int:
    """Return each worker's number of rows in a batch that the workers share.

    Raises
    ------
    InputError
        The batch cannot be divided equally.
    """
    if batch_size % workers:
        raise InputError(
            f"a batch of {batch_size} rows cannot be shared equally by {workers} workers, as "
            "strong scaling requires: choose a `batch_size` that is a multiple of each number of "
            "workers"
        )
    return batch_size // workers


def resolve_scale(call: TrainingCall) -> TrainingCall:
    """Return the call with the workers, batch and steps from a `ScaleOrder`.

    Checkpoints, models and event files are not written.
    """
    order = _read_order()
    if order is None:
        return call
    if isinstance(call.options["exchange"], ParameterServer):
        raise InputError(
            f"bench-scale measures synchronous training: leave out {term('ParameterServer')}"
        )
    batch_size = order.batch_size
    if batch_size is None:
        batch_size = check_whole_number("batch_size", call.options["batch_size"], least=1)
    own = share_batch(batch_size, order.workers) if order.is_shared else batch_size
    settled = replace(
        call,
        elastic=None,
        tensorboard=None,
        shares_memory=False,  # the figures are projected to several hosts
    ).with_options(
        workers=order.workers,
        batch_size=own,
        callbacks=_leave_out_backups(call.options["callbacks"]),
        recovery=without_folder(call.options["recovery"]),
        model_options=replace(check_model_options(call.options["model_options"]), uri=None),
    )
    if order.steps is None:
        return settled
    return settled.with_options(initial_epoch=0, epochs=1, steps_per_epoch=order.steps)


def check_scale(request: Request[TrainingJob]) -> None:
    """Reject data whose batches do not have the size that the `ScaleOrder` requires."""
    order = _read_order()
    if order is None or order.workers == 1:
        return
    data = request.datasets["train"]
    if order.is_shared and isinstance(data, FunctionRows):
        raise InputError(
            "the batches that a `data` function returns belong to one worker and cannot be shared "
            "as strong scaling requires: use --mode weak, or pass rows or files"
        )
    if not order.is_shared and isinstance(data, Batches):
        raise InputError(
            "the workers share the batches of `data`, so the batches do not grow with the number "
            "of workers, as weak scaling requires: use --mode strong, or pass rows or files"
        )


def note_scale(request: Request[TrainingJob], result: TrainResult) -> None:
    """Write the measurements if there is a `ScaleOrder`; later training runs overwrite them."""
    order = _read_order()
    if order is None:
        return
    size = request.job.batch_size * (order.workers if order.is_shared else 1)
    has_batches = isinstance(request.datasets["train"], (Batches, FunctionRows))
    found = ScaledTraining(
        count_rows(result, None if has_batches else request.job.batch_size),
        size,
        [replace(report, inputs=None) for report in result.workers],
    )
    partial = Path(order.folder, f"{_FILE}.partial")
    partial.write_text(encode(found))
    partial.replace(Path(order.folder, _FILE))


def read_scale(folder: str) -> ScaledTraining | None:
    """Read the measurements from a script's training run; None if it did not train."""
    try:
        return decode(Path(folder, _FILE).read_bytes(), ScaledTraining)
    except FileNotFoundError:
        return None


def write_order(order: ScaleOrder) -> dict[str, str]:
    """Return the environment for a process, including the `ScaleOrder` for its training run."""
    return {**os.environ, VARIABLE: encode(order)}


def count_rows(result: TrainResult, batch_size: int | None) -> float:
    """Return the rows per step over all workers; at most ``batch_size`` per worker, if known."""
    steps = result.workers[0].steps
    if not steps:
        raise InputError("training took no steps: there is nothing to measure")
    counted = sum(worker.rows for worker in result.workers) * result.epochs / steps
    # Epochs of fewer steps do not use all rows.
    return counted if batch_size is None else min(counted, batch_size * len(result.workers))


def _leave_out_backups(callbacks: Any) -> Any:
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(callbacks, (list, tuple)):
        return callbacks
    return [c for c in callbacks if not isinstance(c, keras.callbacks.BackupAndRestore)]


def _read_order() -> ScaleOrder | None:
    text = os.environ.get(VARIABLE)
    if text is None:
        return None
    try:
        return decode(text, ScaleOrder)
    except ValueError as error:
        raise ClusterError(
            f"{VARIABLE} is set, but not by `tfdist bench-scale`: {error}. Unset it"
        ) from error
