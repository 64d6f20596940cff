"""Distribute the rows in parameter-server training to the workers and the chief.

Launchers distribute rows equally to all ranks. The shares of the chief and the parameter servers
are meant for the workers, and validation rows are meant for the chief: TensorFlow moves their files
before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pybackend.core.data.rows import StoredRows
from pybackend.core.job.job import TrainingJob
from pybackend.core.parameter_server.blocks import move_blocks, write_blocks
from pybackend.core.tf_config import find_role, ranks_of

TRAIN = "blocks/train"
VALIDATION = "blocks/validation"
# File with the number of the worker whose folder contains it.
NUMBER = "blocks/number"


def device_of(job: TrainingJob, rank: int) -> str:
    """Return TensorFlow's name for a rank's processor."""
    role, index = find_role(job.roles, rank)
    return f"/job:{role}/replica:0/task:{index}/device:CPU:0"


def write_shares(job: TrainingJob, rank: int, folder: Path) -> None:
    """Write this rank's rows as blocks, with a folder for each worker."""
    rows = StoredRows(folder / "train")
    places = np.arange(len(rows))
    if job.shuffle:
        np.random.default_rng([job.seed, rank]).shuffle(places)
    for number, part in _share_out(job, rank).items():
        write_blocks(rows, places[part], folder / _folder_for(job, rank, number), str(rank))
    if find_role(job.roles, rank)[0] == "worker":
        (folder / NUMBER).write_text(str(find_role(job.roles, rank)[1]))
    if (folder / "validation").exists():
        validation = StoredRows(folder / "validation")
        write_blocks(validation, np.arange(len(validation)), folder / VALIDATION, str(rank))


def move_shares(job: TrainingJob, counts: Mapping[str, Sequence[int]]) -> None:
    """Move all blocks to the processes that read them; every rank's process is in its folder."""
    for rank in range(job.workers):
        own = device_of(job, rank)
        for number, part in _share_out(job, rank).items():
            folder = _folder_for(job, rank, number)
            if folder != TRAIN and range(counts["train"][rank])[part]:
                move_blocks(
                    folder, own, TRAIN, device_of(job, ranks_of(job.roles, "worker")[number])
                )
        if rank and "validation" in counts and counts["validation"][rank]:
            move_blocks(VALIDATION, own, VALIDATION, device_of(job, 0))


def count_shares(job: TrainingJob, counts: Sequence[int]) -> list[int]:
    """Return the rows of each worker after `move_shares`.

    Parameters
    ----------
    counts
        Rows of every rank's shard.
    """
    found = [0] * len(ranks_of(job.roles, "worker"))
    for rank, count in enumerate(counts):
        for number, part in _share_out(job, rank).items():
            found[number] += len(range(count)[part])
    return found


def _share_out(job: TrainingJob, rank: int) -> dict[int, slice]:
    """Return the part of a rank's rows for each worker, by the worker's number."""
    role, index = find_role(job.roles, rank)
    workers = len(ranks_of(job.roles, "worker"))
    if role == "worker":
        return {index: slice(None)}
    return {number: slice(number, None, workers) for number in range(workers)}


def _folder_for(job: TrainingJob, rank: int, number: int) -> str:
    """Return the folder in which a rank writes the rows of a worker."""
    return TRAIN if find_role(job.roles, rank)[0] == "worker" else f"blocks/for-{number}"
