"""What the tasks of a job leave in its folder: their logs, and by the logs' names their hosts."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pybackend.launchers.child import LOG_LINES
from pybackend.launchers.slurm.nodes import expand_nodes

# What srun prints of the tasks that failed first.
_TASKS_FAILED = re.compile(r"^srun: error: \S+: tasks? ([\d,-]+): (.*)$", re.MULTILINE)


class JobFiles(Sequence[str]):
    """What the tasks of a job write into its folder; as a sequence, each rank's host."""

    def __init__(self, folder: Path, workers: int) -> None:
        self.folder = folder
        self._workers = workers

    @property
    def batch_log(self) -> Path:
        """Of the batch script, and of srun itself."""
        return self.folder / "job.log"

    @property
    def task_log(self) -> Path:
        """Of each task, as srun's options have it: by rank and host."""
        return self.folder / "worker-%t-%N.log"

    def __len__(self) -> int:
        return self._workers

    def __getitem__(self, rank: int) -> str:  # type: ignore[override]
        """The host of a rank, once its task has started."""
        found = [path.stem.split("-", 2)[2] for path in self._logs(rank)]
        return found[0] if found else "no host yet"

    def last_lines(self, rank: int) -> tuple[str, ...]:
        """The end of a task's log, or of the batch script's."""
        paths = [*self._logs(rank), self.batch_log]
        texts = [path.read_text(errors="replace") for path in paths if path.exists()]
        return tuple("\n".join(texts).splitlines()[-LOG_LINES:])

    def first_failed(self) -> dict[int, str]:
        """What srun says of the tasks that ended first, by rank."""
        log = self.batch_log
        found = _TASKS_FAILED.search(log.read_text(errors="replace")) if log.exists() else None
        if found is None:
            return {}
        return {int(rank): found[2] for rank in expand_nodes(f"[{found[1]}]")}

    def _logs(self, rank: int) -> list[Path]:
        return list(self.folder.glob(f"worker-{rank}-*.log"))
