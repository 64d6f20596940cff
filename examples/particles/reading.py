"""Read the published files: TFRecord as batches, Parquet as arrays or as a DataFrame."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from layout import CLASSES, GRU, HIGH_LEVEL_FEATURES, HLF, LABEL, PARTICLE_FEATURES

_COLUMN_OF = {"gru_input": GRU, "hlf_input": HLF}
_SHAPES = {
    HLF: [len(HIGH_LEVEL_FEATURES)],
    GRU: [-1, len(PARTICLE_FEATURES)],
    LABEL: [len(CLASSES)],
}
_OPEN_AT_ONCE = 8


def pipeline(
    files: Sequence[str], inputs: Sequence[str], batch_size: int = 128
) -> Callable[[Any], Any]:
    """Return a function for `barrier_train` that returns the batches of a worker's own files.

    Parameters
    ----------
    files
        TFRecord files that all workers' machines can read.
    inputs
        Inputs of the model, whose columns are read: ``"gru_input"``, ``"hlf_input"``.
    """

    def read(context: Any) -> Any:
        return read_batches(files, inputs, batch_size, context.rank, context.world_size)

    return read


def read_batches(
    files: Sequence[str], inputs: Sequence[str], batch_size: int, rank: int = 0, workers: int = 1
) -> Any:
    """Return a ``tf.data.Dataset`` of one worker's batches, always in the same order.

    Several files are read at once, rows are decoded once and cached in memory, and batches are
    prefetched.
    """
    import tensorflow as tf

    columns = {name: _COLUMN_OF[name] for name in inputs}
    spec = {column: tf.io.RaggedFeature(tf.float32) for column in (*columns.values(), LABEL)}

    def decode(record: Any) -> tuple[dict[str, Any], Any]:
        row = tf.io.parse_single_example(record, spec)
        x = {name: tf.reshape(row[column], _SHAPES[column]) for name, column in columns.items()}
        return x, tf.reshape(row[LABEL], _SHAPES[LABEL])

    own = tf.data.Dataset.from_tensor_slices(sorted(files)).shard(workers, rank)
    rows = own.interleave(
        tf.data.TFRecordDataset, cycle_length=_OPEN_AT_ONCE, num_parallel_calls=tf.data.AUTOTUNE
    )
    rows = rows.map(decode, num_parallel_calls=tf.data.AUTOTUNE).cache()
    return rows.batch(batch_size).prefetch(tf.data.AUTOTUNE)


def read_parquet(
    path: str | Path, inputs: Sequence[str] = tuple(_COLUMN_OF)
) -> tuple[dict[str, Any], Any]:
    """Return all rows of Parquet files as arrays: the inputs by name, and the labels, one-hot.

    Lists of particles may be flat, or lists of lists as in the larger of the published files; the
    smaller ones have none: read them with ``inputs=["hlf_input"]``.

    Raises
    ------
    ValueError
        Rows have lists of different lengths: they were not padded.
    """
    import pyarrow.parquet as pq

    columns = {name: _COLUMN_OF[name] for name in inputs}
    table = pq.read_table(path, columns=[*columns.values(), LABEL])
    x = {name: _to_array(table[column], column) for name, column in columns.items()}
    return x, _to_array(table[LABEL], LABEL)


def read_frame(spark: Any, path: str) -> Any:
    """Return a DataFrame of Parquet files that can be written as TFRecord.

    In the larger of the published files high-level features and labels are ML vectors, and the
    particles lists of lists: all become flat arrays. The smaller ones have no particles.
    """
    from pyspark.ml.functions import vector_to_array
    from pyspark.sql import functions as f

    frame = spark.read.parquet(path)
    frame = frame.select([name for name in (GRU, HLF, LABEL) if name in frame.columns])
    kinds = {field.name: field.dataType.simpleString() for field in frame.schema.fields}
    for name, kind in kinds.items():
        if kind == "vector":
            frame = frame.withColumn(name, vector_to_array(name))
        elif kind.startswith("array<array"):
            frame = frame.withColumn(name, f.flatten(name))
    return frame


def _to_array(values: Any, column: str) -> Any:
    """Return a column of lists, flat or nested, as an array of float32 with a row per list."""
    import pyarrow as pa

    rows, flat = len(values), values.combine_chunks()
    while pa.types.is_list(flat.type) or pa.types.is_large_list(flat.type):
        # A missing list has no length, and would shift all following rows.
        if len(flat.value_lengths().unique()) > 1 or flat.null_count:
            raise ValueError(f"the lists of the column {column} are of several lengths, or missing")
        flat = flat.flatten()
    return np.asarray(flat, dtype="float32").reshape(rows, *_SHAPES[column])
