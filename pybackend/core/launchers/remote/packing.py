"""Files that all workers of a group on other hosts receive."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cloudpickle

from pybackend.core.data.arrays import Columns, count_rows, shard
from pybackend.core.data.row_store import write_columns
from pybackend.core.job.job import Job
from pybackend.core.launchers.remote.bundle import library
from pybackend.core.launchers.remote.task import TASK, RemoteTask

ROWS = "rows"
# In place of a rank: rows that all workers have.
_ALL = "all"


def pack_task(task: RemoteTask, folder: Path, datasets: Mapping[str, Any]) -> dict[str, bytes]:
    """Write all rows into a folder, for the members of the task.

    Returns the contents of every worker's `Bundle`, to which the files of its rows are added.
    """
    if datasets:
        counts = write_rows(folder, task.member.job, datasets)
        task = replace(task, member=replace(task.member, source=RowFolder(), counts=counts))
    return {**library(), TASK: cloudpickle.dumps(task)}


def write_rows(folder: Path, job: Job, datasets: Mapping[str, Columns]) -> dict[str, list[int]]:
    """Write each rank's rows into a folder, and return their numbers by data set."""
    counts = {}
    for name, columns in datasets.items():
        parts = [shard(columns, job.workers, rank) for rank in range(job.workers)]
        counts[name] = [count_rows(part) for part in parts]
        (folder / ROWS / name).mkdir(parents=True)
        if job.is_elastic or (name == "train" and job.shuffles_globally):
            write_columns(folder / ROWS / name / _ALL, columns)
            continue
        for rank, part in enumerate(parts):
            write_columns(folder / ROWS / name / str(rank), part)
    return counts


def files_of_ranks(folder: Path, ranks: Iterable[int]) -> dict[str, Path]:
    """Return the files written by `write_rows` for some ranks, by their names in the folder."""
    wanted = {_ALL, *map(str, ranks)}
    return {
        str(path.relative_to(folder)): path
        for path in sorted((folder / ROWS).glob("*/*/*"))
        if path.parent.name in wanted
    }


@dataclass(frozen=True)
class RowFolder:
    """A `Source` for members whose input is a folder written by `write_rows`."""

    def spool(self, batches: Iterable[Any], rank: int, folder: Path) -> None:
        for given in batches:
            for data_set in sorted(Path(given, ROWS).iterdir()):
                own = data_set / str(rank)
                _place(own if own.is_dir() else data_set / _ALL, folder / data_set.name)


def _place(source: Path, folder: Path) -> None:
    """Create a folder with the same rows, without copying them if possible."""
    folder.mkdir()
    for file in source.iterdir():
        target = folder / file.name
        if file.suffix == ".npy":  # the description is written again
            with suppress(OSError):  # on another disk
                os.link(file, target)
                continue
        shutil.copyfile(file, target)
