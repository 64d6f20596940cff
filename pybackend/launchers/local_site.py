"""Where the workers of an elastic training on this machine run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from pybackend.data.arrays import Columns
from pybackend.data.spool import link_columns, write_columns
from pybackend.errors import Failure
from pybackend.job.job import Job
from pybackend.job.report import WorkerReport
from pybackend.launchers.child import Child
from pybackend.launchers.elastic import Said


class LocalSite:
    """A `Site`: processes of this machine; a context manager, which ends them.

    Parameters
    ----------
    files, datasets
        As in `Launcher.launch`.
    host
        Address at which the workers reach each other.
    shares
        Variables of the worker in each place.
    """

    def __init__(
        self,
        job: Job,
        files: Mapping[str, bytes],
        datasets: Mapping[str, Columns],
        host: str,
        shares: Sequence[Mapping[str, str]],
    ) -> None:
        self.places = len(shares)
        self._host = host
        self._job = job
        self._files = files
        self._datasets = datasets
        self._shares = shares
        self._children: list[Child] = []
        self._stack = ExitStack()

    def __enter__(self) -> LocalSite:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def start(self, number: int, place: int, say: Callable[[Said], None]) -> Child:
        """See `Site`."""
        child = Child(self._job, number, self._host, say, self._shares[place])
        self._stack.enter_context(child)
        try:
            child.start(self._files)
            for name, columns in self._datasets.items():
                self._give_rows(child, name, columns)
        except BaseException:
            child.close()
            raise
        self._children.append(child)
        threading.Thread(target=_wait_for, args=(child, say), daemon=True).start()
        return child

    def _give_rows(self, child: Child, name: str, columns: Columns) -> None:
        """Write the rows once, and link them into the folders of the others."""
        holder = next((c for c in self._children if not c.is_closed), None)
        if holder is not None:
            link_columns(child.folder / name, holder.folder / name)
        else:
            write_columns(child.folder / name, columns)


def _wait_for(child: Child, say: Callable[[Said], None]) -> None:
    try:
        report = child.wait()
    except Exception as error:  # whatever it is, it must not leave the launcher waiting
        kind, text = type(error).__name__, str(error)
        failure = Failure(child.rank, child.host, kind, text, time=time.time())
        report = WorkerReport(child.rank, child.host, child.pid, failure=failure)
    say(report)
