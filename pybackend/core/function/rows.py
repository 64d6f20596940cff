"""Rows for a worker's function, in a folder that was filled beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pybackend.core.data.rows import StoredRows
from pybackend.core.job.arguments import check_whole_number


class StoredColumns:
    """Rows in a folder, in order of arrival."""

    def __init__(self, folder: Path) -> None:
        self._rows = StoredRows(folder)

    def batches(self, batch_size: int) -> Iterator[Mapping[str, Any]]:
        """Yield batches of rows as columns by name, as `WorkerContext.feed` returns them."""
        size = check_whole_number("batch_size", batch_size, least=1)
        for start in range(0, len(self._rows), size):
            found = self._rows.take(np.arange(start, min(start + size, len(self._rows))))
            yield {key.partition("/")[2]: _to_text(column) for key, column in found.items()}


def _to_text(column: Any) -> Any:
    """Return a column of text as strings, one per row; other columns unchanged."""
    if column.dtype.kind != "O":
        return column
    texts = np.empty(len(column), object)
    texts[:] = [value.decode() for value in column[:, 0]]
    return texts
