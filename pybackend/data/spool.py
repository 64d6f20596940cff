"""A worker's rows on disk: one ``.npy`` file per column, read back memory-mapped."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from pybackend.data.arrays import Columns

_INDEX = "columns.json"


def write_columns(folder: Path, columns: Columns) -> None:
    """Write columns of equal length into a new folder."""
    folder.mkdir()
    files = {}
    for number, (key, array) in enumerate(columns.items()):
        # The number keeps names apart that differ only in characters no file name may have.
        files[key] = f"{number}-{re.sub(r'[^A-Za-z0-9_]', '_', key)[:60]}.npy"
        np.save(folder / files[key], np.ascontiguousarray(array), allow_pickle=False)
    (folder / _INDEX).write_text(json.dumps(files))


def read_columns(folder: Path) -> Columns:
    """Columns written by `write_columns`, in their order, without copying them into memory."""
    files = json.loads((folder / _INDEX).read_text())
    columns = {}
    for key, name in files.items():
        array = np.load(folder / name, mmap_mode="r", allow_pickle=False)
        columns[key] = array
    return columns
