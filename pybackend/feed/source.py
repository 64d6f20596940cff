"""Where the rows of a worker's function come from: a folder that was filled before, or feeds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pybackend.data.rows import SpooledRows
from pybackend.errors import InputError
from pybackend.feed.items import decode_columns
from pybackend.feed.protocol import FEED
from pybackend.feed.queue import RowQueue
from pybackend.feed.server import FeedServer
from pybackend.job.arguments import check_whole_number
from pybackend.job.job import FEED_TOKEN, ROWS


class FedRows:
    """Rows that come while the function runs, from `queue`."""

    def __init__(self, queue: RowQueue) -> None:
        self.queue = queue

    def batches(self, batch_size: int) -> Iterator[Mapping[str, Any]]:
        """See `WorkerContext.feed`."""
        size = check_whole_number("batch_size", batch_size, least=1)
        layout: dict[str, Any] = {}
        while parts := [
            _columns_of(batch.slice(start, stop - start), layout)
            for batch, start, stop in self.queue.take_batches(size)
        ]:
            yield {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}


class SpooledColumns:
    """Rows that lie in a folder, in the order in which they came."""

    def __init__(self, folder: Path) -> None:
        self._rows = SpooledRows(folder)

    def batches(self, batch_size: int) -> Iterator[Mapping[str, Any]]:
        """See `WorkerContext.feed`."""
        size = check_whole_number("batch_size", batch_size, least=1)
        for start in range(0, len(self._rows), size):
            found = self._rows.take(np.arange(start, min(start + size, len(self._rows))))
            yield {key.partition("/")[2]: _to_text(column) for key, column in found.items()}


@contextmanager
def open_source(
    folder: Path, host: str, announce: Callable[[str, str], object]
) -> Iterator[FedRows | SpooledColumns | None]:
    """The rows of the worker whose folder this is; None if it has none.

    On leaving, those that feed it learn whether the function has failed.
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
    """Text as the user's own, of one value per row; all else as it is."""
    if column.dtype.kind != "O":
        return column
    texts = np.empty(len(column), object)
    texts[:] = [value.decode() for value in column[:, 0]]
    return texts


def _columns_of(batch: Any, layout: dict[str, Any]) -> dict[str, Any]:
    """The columns of some rows, all like those of the first rows, which ``layout`` describes."""
    found = decode_columns(batch)
    if found is None:
        raise InputError(
            "context.feed() needs rows with columns: of a DataFrame, or tuples, dicts or lists of "
            "one length; these are single values"
        )
    now = {name: (column.dtype, column.shape[1:]) for name, column in found}
    if not layout:
        layout.update(now)
    elif now != layout:
        names = [name for name in {**layout, **now} if now.get(name) != layout.get(name)]
        raise InputError(
            f"context.feed() needs rows that are all alike, and column {names[0]!r} has "
            f"{_describe(now.get(names[0]))} after {_describe(layout.get(names[0]))}: give all "
            "rows the same columns, types and lengths of lists"
        )
    return dict(found)


def _describe(layout: tuple[Any, tuple[int, ...]] | None) -> str:
    return "no values" if layout is None else f"{layout[0]} of shape {list(layout[1])} per row"
