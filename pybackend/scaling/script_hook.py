"""The hook of training runs in scripts that `tfdist bench-scale` starts.

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
from pybackend.core.api.train_result import TrainResult
from pybackend.core.data.batches import Batches
from pybackend.core.data.sources import FunctionRows
from pybackend.core.errors import ClusterError, InputError
from pybackend.core.job.arguments import check_whole_number
from pybackend.core.job.codec import decode, encode
from pybackend.core.job.job import TrainingJob
from pybackend.core.job.storage_options import check_model_options, without_folder
from pybackend.core.job.worker_options import ParameterServer
from pybackend.core.words import call_of, term
from pybackend.scaling.measured import ScaledTraining, count_rows, share_batch

# `pybackend/__init__.py` registers the hook in processes that have it.
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


class ScriptHook:
    """Apply the `ScaleOrder` of this process to its training calls, and measure them."""

    def resolve(self, call: TrainingCall) -> TrainingCall:
        """Return the call with the workers, batch and steps from the order.

        Checkpoints, models and event files are not written.
        """
        order = _read_order()
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
            shares_memory=False,  # the measured times are projected to several hosts
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

    def check(self, request: Request[TrainingJob]) -> None:
        """Reject data whose batches do not have the size that the order requires."""
        order, data = _read_order(), request.datasets["train"]
        if order.workers == 1:
            return
        if order.is_shared and isinstance(data, FunctionRows):
            raise InputError(
                "the batches that a `data` function returns belong to one worker and cannot be "
                "shared as strong scaling requires: use --mode weak, or pass rows or files"
            )
        if not order.is_shared and isinstance(data, Batches):
            raise InputError(
                "the workers share the batches of `data`, so the batches do not grow with the "
                "number of workers, as weak scaling requires: use --mode strong, or pass rows or "
                "files"
            )

    def note(self, request: Request[TrainingJob], result: TrainResult) -> None:
        """Write the measurements; those of a later training run replace them."""
        order, batch_size = _read_order(), request.job.batch_size
        has_batches = isinstance(request.datasets["train"], (Batches, FunctionRows))
        found = ScaledTraining(
            count_rows(result, None if has_batches else batch_size),
            batch_size * (order.workers if order.is_shared else 1),
            [replace(report, inputs=None) for report in result.workers],
        )
        # Renamed when complete: the script may be killed meanwhile.
        partial = Path(order.folder, f"{_FILE}.partial")
        partial.write_text(encode(found))
        partial.replace(Path(order.folder, _FILE))

    def check_submission(self, call: TrainingCall) -> None:
        raise InputError(
            f"bench-scale waits for the training: call {call_of('barrier_train', ...)}"
        )


HOOK = ScriptHook()


def read_scale(folder: str) -> ScaledTraining | None:
    """Read the measurements from a script's training run; None if it did not train."""
    try:
        return decode(Path(folder, _FILE).read_bytes(), ScaledTraining)
    except FileNotFoundError:
        return None


def write_order(order: ScaleOrder) -> dict[str, str]:
    """Return the environment for a process, including the order for its training run."""
    return {**os.environ, VARIABLE: encode(order)}


def _leave_out_backups(callbacks: Any) -> Any:
    keras = sys.modules.get("keras")
    if keras is None or not isinstance(callbacks, (list, tuple)):
        return callbacks
    return [c for c in callbacks if not isinstance(c, keras.callbacks.BackupAndRestore)]


def _read_order() -> ScaleOrder:
    try:
        return decode(os.environ[VARIABLE], ScaleOrder)
    except ValueError as error:
        raise ClusterError(
            f"{VARIABLE} is set, but not by `tfdist bench-scale`: {error}. Unset it"
        ) from error
