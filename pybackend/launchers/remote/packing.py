"""What all workers of a gang on other hosts get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import cloudpickle

from pybackend.launchers.remote.bundle import library
from pybackend.launchers.remote.row_files import RowFolder, write_rows
from pybackend.launchers.remote.task import TASK, RemoteTask


def pack_task(task: RemoteTask, folder: Path, datasets: Mapping[str, Any]) -> dict[str, bytes]:
    """Write all rows into a folder, for the members of the task to read.

    Returns the contents of every worker's `Bundle`; the files of its own rows go with them.
    """
    if datasets:
        counts = write_rows(folder, task.member.job, datasets)
        task = replace(task, member=replace(task.member, source=RowFolder(), counts=counts))
    return {**library(), TASK: cloudpickle.dumps(task)}
