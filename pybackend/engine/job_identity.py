"""Description of a training that must be the same when it resumes from a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pybackend.collective import Collective
from pybackend.data.checkpoint_checks import describe_settings
from pybackend.data.rows import Rows
from pybackend.job.job import TrainingJob, argument_of
from pybackend.model.structure import digest_model

# Rows that are compared: a file of other rows differs in these, too.
_SAMPLED_ROWS = 512


def describe_training(
    job: TrainingJob,
    model: Any,
    callbacks: Sequence[Any],
    rows: Mapping[str, Rows | None],
    collective: Collective,
) -> dict[str, Any]:
    """Describe a training by the names of its arguments, as JSON values.

    Parameters
    ----------
    rows
        This worker's rows, by data set; None if they cannot be read.
    """
    described = describe_settings(job)
    described["callbacks"] = [type(callback).__name__ for callback in callbacks]
    # First the differences that can be reported exactly.
    described["weights"] = [f"{v.dtype} {tuple(v.shape)}" for v in model.weights]
    described["model"] = digest_model(model)
    for name, own in rows.items():
        described[argument_of(name)] = None if own is None else _describe_rows(own, collective)
    return described


def _describe_rows(rows: Rows, collective: Collective) -> list[list[Any]]:
    """Return the number of rows and a digest of some of them, for each rank."""
    digest = hashlib.blake2b(digest_size=16)
    count = len(rows)
    if count:
        sampled = min(count, _SAMPLED_ROWS)
        places = np.arange(sampled, dtype=np.int64) * count // sampled
        for name, column in rows.take(places).items():
            array = np.asarray(column)
            content = repr(array.tolist()).encode() if array.dtype.kind == "O" else array.tobytes()
            digest.update(f"{name} {array.dtype} {array.shape}".encode() + content)
    own = np.frombuffer(json.dumps([count, digest.hexdigest()]).encode(), np.uint8).copy()
    return [json.loads(part.tobytes()) for part in collective.all_gather(own)]
