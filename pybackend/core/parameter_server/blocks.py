"""Rows as small files of tensors, which TensorFlow's own operations read, move and iterate over.

A TensorFlow server runs operations, not Python, so it finds the rows by file names in its folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from pybackend.core.data.arrays import nest
from pybackend.core.data.files import naming_full_disk
from pybackend.core.data.rows import Rows, Spec
from pybackend.core.job.job import TrainingJob

_BLOCK_BYTES = 1 << 20
# Rows in memory from which the next one is drawn.
_DRAWN_BYTES = 32 << 20
_LEAST_DRAWN = 256


def write_blocks(rows: Rows, places: npt.NDArray[np.int64], folder: Path, prefix: str) -> None:
    """Write some rows, in this order, as files ``<prefix>-<block>.<column>`` of one tensor each."""
    folder.mkdir(parents=True, exist_ok=True)
    size = max(1, _BLOCK_BYTES // max(1, rows.row_bytes))
    with naming_full_disk(folder, "rows"):
        for number, first in enumerate(range(0, len(places), size)):
            block = rows.take(places[first : first + size])
            for column, values in enumerate(block.values()):
                path = folder / f"{prefix}-{number:06d}.{column}"
                path.write_bytes(tf.make_tensor_proto(values).SerializeToString())


def move_blocks(folder: str, source: str, into: str, target: str) -> None:
    """Move the files in a folder on one device's machine to a folder on another's machine."""
    with tf.device(source):
        names = tf.io.matching_files(f"{folder}/*").numpy()
    for name in names:
        with tf.device(source):
            content = tf.io.read_file(name)
        with tf.device(target):
            tf.io.write_file(f"{into}/{name.decode().rpartition('/')[2]}", content)


def iterate_blocks(folder: str, written: Spec, wanted: Spec, seed: int | None = None) -> Any:
    """Return a ``tf.data.Dataset`` of the rows in a folder of the machine that it runs on.

    Parameters
    ----------
    written, wanted
        Type and shape of a row by column, in the same order: as written, and as the model needs it.
    seed
        Seed for the order of the files; None: their original order.
    """

    def read(path: Any) -> dict[str, Any]:
        name = tf.strings.regex_replace(path, r"\.0$", ".")
        found = {}
        pairs = zip(written.values(), wanted.items(), strict=True)
        for number, ((dtype, _), (key, (_, shape))) in enumerate(pairs):
            kind = tf.string if dtype.kind == "O" else tf.as_dtype(dtype)
            values = tf.io.parse_tensor(tf.io.read_file(name + str(number)), kind)
            found[key] = tf.reshape(values, (-1, *shape))
        return found

    is_shuffled = seed is not None
    paths = tf.data.Dataset.list_files(f"{folder}/*.0", shuffle=is_shuffled, seed=seed)
    return paths.map(read).unbatch()


def draw(rows: Any, row_bytes: int, seed: int) -> Any:
    """Shuffle the rows differently each time, drawing from as many as fit into memory."""
    return rows.shuffle(max(_LEAST_DRAWN, _DRAWN_BYTES // max(1, row_bytes)), seed=seed)


def batch(rows: Any, job: TrainingJob) -> Any:
    """Return batches of ``(x, y)`` or ``(x, y, sample_weight)``."""
    return rows.batch(job.batch_size).map(nest).prefetch(2)
