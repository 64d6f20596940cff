"""Sources of rows for a worker's function: a folder that was filled beforehand, or feeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pybackend.data.rows import StoredRows
from pybackend.feed.protocol import FEED
from pybackend.feed.queue import RowQueue
from pybackend.feed.server import FeedServer
from pybackend.job.arguments import check_whole_number
from pybackend.job.job import FEED_TOKEN, ROWS


@dataclass(frozen=True)
class FedRows:
    """Rows that arrive in `queue` while the function runs."""

    queue: RowQueue


class SpooledColumns:
    """Rows in a folder, in order of arrival."""

    def __init__(self, folder: Path) -> None:
        self._rows = StoredRows(folder)

    def batches(self, batch_size: int) -> Iterator[Mapping[str, Any]]:
        """Yield batches of rows as columns by name, as `WorkerContext.feed` returns them."""
        size = check_whole_number("batch_size", batch_size, least=1)
        for start in range(0, len(self._rows), size):
            found = self._rows.take(np.arange(start, min(start + size, len(self._rows))))
            yield {key.partition("/")[2]: _to_text(column) for key, column in found.items()}


@contextmanager
def open_source(
    folder: Path, host: str, announce: Callable[[str, str], object]
) -> Iterator[FedRows | SpooledColumns | None]:
    """Open the rows of the worker with this folder; None if there are none.

    On exit, the feeders are notified whether the function failed.
    """
    if (folder / ROWS).is_dir():
        yield SpooledColumns(folder / ROWS)
    elif (folder / FEED_TOKEN).exists():
        server = FeedServer(host, (folder / FEED_TOKEN).read_text())
        announce(FEED, server.address)
        try:
            yield FedRows(server.queue)
        except BaseException as error:
            server.fail(f"{type(error).__name__}: {error}")
            raise
        server.finish()
    else:
        yield None


def _to_text(column: Any) -> Any:
    """Return a column of text as strings, one per row; other columns unchanged."""
    if column.dtype.kind != "O":
        return column
    texts = np.empty(len(column), object)
    texts[:] = [value.decode() for value in column[:, 0]]
    return texts
