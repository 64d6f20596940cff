"""Rows in training with parameter servers: small files of tensors.

A TensorFlow server runs operations, not Python, so it finds the rows by file names in its folder.
Launchers distribute rows equally to all ranks. The shares of the chief and the parameter servers
are meant for the workers, and validation rows are meant for the chief: TensorFlow moves their files
before the first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from pybackend.core.data.arrays import nest
from pybackend.core.data.files import naming_full_disk
from pybackend.core.data.rows import Rows, Spec, StoredRows
from pybackend.core.job.job import TrainingJob
from pybackend.core.tf_config import find_role, ranks_of

_BLOCK_BYTES = 1 << 20
# Rows in memory from which the next one is drawn.
_DRAWN_BYTES = 32 << 20
_LEAST_DRAWN = 256


def write_blocks(rows: Rows, order: npt.NDArray[np.int64], folder: Path, prefix: str) -> None:
    """Write some rows, in this order, as files ``<prefix>-<block>.<column>`` of one tensor each."""
    folder.mkdir(parents=True, exist_ok=True)
    size = max(1, _BLOCK_BYTES // max(1, rows.row_bytes))
    with naming_full_disk(folder, "rows"):
        for number, first in enumerate(range(0, len(order), size)):
            block = rows.take(order[first : first + size])
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

    ``written`` and ``wanted`` have the type and shape of a row by column, in the same order: as
    written, and as the model needs it. ``seed`` is for the order of the files; None: their original
    order.
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
    return rows.batch(job.batch_size).map(nest).prefetch(2)


TRAIN = "blocks/train"
VALIDATION = "blocks/validation"
# File with the number of the worker whose folder contains it.
NUMBER = "blocks/number"


def _device_of(job: TrainingJob, rank: int) -> str:
    role, index = find_role(job.roles, rank)
    return f"/job:{role}/replica:0/task:{index}/device:CPU:0"


def write_shares(job: TrainingJob, rank: int, folder: Path) -> None:
    rows = StoredRows(folder / "train")
    order = np.arange(len(rows))
    if job.shuffle:
        np.random.default_rng([job.seed, rank]).shuffle(order)
    for number, part in _share_out(job, rank).items():
        write_blocks(rows, order[part], folder / _folder_for(job, rank, number), str(rank))
    if find_role(job.roles, rank)[0] == "worker":
        (folder / NUMBER).write_text(str(find_role(job.roles, rank)[1]))
    if (folder / "validation").exists():
        validation = StoredRows(folder / "validation")
        write_blocks(validation, np.arange(len(validation)), folder / VALIDATION, str(rank))


def move_shares(job: TrainingJob, counts: Mapping[str, Sequence[int]]) -> None:
    """Move all blocks to the processes that read them; every rank's process is in its folder."""
    for rank in range(job.workers):
        own = _device_of(job, rank)
        for number, part in _share_out(job, rank).items():
            folder, worker = _folder_for(job, rank, number), ranks_of(job.roles, "worker")[number]
            if folder != TRAIN and range(counts["train"][rank])[part]:
                move_blocks(folder, own, TRAIN, _device_of(job, worker))
        if rank and "validation" in counts and counts["validation"][rank]:
            move_blocks(VALIDATION, own, VALIDATION, _device_of(job, 0))


def count_shares(job: TrainingJob, counts: Sequence[int]) -> list[int]:
    """Return the rows of each worker after `move_shares`, given the rows of every rank's shard."""
    found = [0] * len(ranks_of(job.roles, "worker"))
    for rank, count in enumerate(counts):
        for number, part in _share_out(job, rank).items():
            found[number] += len(range(count)[part])
    return found


def _share_out(job: TrainingJob, rank: int) -> dict[int, slice]:
    """Return the part of a rank's rows for each worker, by the worker's number."""
    role, index = find_role(job.roles, rank)
    workers = len(ranks_of(job.roles, "worker"))
    shared = {number: slice(number, None, workers) for number in range(workers)}
    return {index: slice(None)} if role == "worker" else shared


def _folder_for(job: TrainingJob, rank: int, number: int) -> str:
    return TRAIN if find_role(job.roles, rank)[0] == "worker" else f"blocks/for-{number}"
