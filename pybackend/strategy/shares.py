"""Which rows each process of a parameter-server training writes down, and where they go.

Launchers deal rows to all ranks alike. Those of the chief and of the parameter servers are for the
workers, and validation rows are for the chief: TensorFlow moves their files before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from pybackend.data.rows import SpooledRows
from pybackend.job.job import TrainingJob
from pybackend.job.roles import place_of, ranks_of
from pybackend.strategy.blocks import move_blocks, write_blocks

TRAIN = "blocks/train"
VALIDATION = "blocks/validation"
# The number of the worker in whose folder it lies.
NUMBER = "blocks/number"


def device_of(job: TrainingJob, rank: int) -> str:
    """TensorFlow's name of a rank's processor."""
    role, index = place_of(job.roles, rank)
    return f"/job:{role}/replica:0/task:{index}/device:CPU:0"


def write_shares(job: TrainingJob, rank: int, folder: Path) -> None:
    """Write this rank's rows as blocks, those of each worker into a folder of its own."""
    rows = SpooledRows(folder / "train")
    places = np.arange(len(rows))
    if job.shuffle:
        np.random.default_rng([job.seed, rank]).shuffle(places)
    for number, part in _share_out(job, rank).items():
        write_blocks(rows, places[part], folder / _folder_for(job, rank, number), str(rank))
    if place_of(job.roles, rank)[0] == "worker":
        (folder / NUMBER).write_text(str(place_of(job.roles, rank)[1]))
    if (folder / "validation").exists():
        held_out = SpooledRows(folder / "validation")
        write_blocks(held_out, np.arange(len(held_out)), folder / VALIDATION, str(rank))


def move_shares(job: TrainingJob, counts: Mapping[str, Sequence[int]]) -> None:
    """Bring all blocks to where they are read; every rank's process is in its folder."""
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
    """Rows of each worker after `move_shares`.

    Parameters
    ----------
    counts
        Rows that every rank was dealt.
    """
    found = [0] * len(ranks_of(job.roles, "worker"))
    for rank, count in enumerate(counts):
        for number, part in _share_out(job, rank).items():
            found[number] += len(range(count)[part])
    return found


def _share_out(job: TrainingJob, rank: int) -> dict[int, slice]:
    """The part of a rank's rows that goes to each worker, by its number."""
    role, index = place_of(job.roles, rank)
    workers = len(ranks_of(job.roles, "worker"))
    if role == "worker":
        return {index: slice(None)}
    return {number: slice(number, None, workers) for number in range(workers)}


def _folder_for(job: TrainingJob, rank: int, number: int) -> str:
    """Where a rank writes the rows of a worker."""
    return TRAIN if place_of(job.roles, rank)[0] == "worker" else f"blocks/for-{number}"
