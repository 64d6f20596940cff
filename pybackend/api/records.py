"""TFRecord files of tf.train.Example from a Spark DataFrame, and back."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pybackend.data.files import is_remote, local_path
from pybackend.data.folder import folder_at
from pybackend.data.tfrecord.compression import Compression, checked_compression
from pybackend.errors import InputError
from pybackend.job.options import check_tfrecord_spec
from pybackend.launchers import is_session, is_spark_frame


@dataclass(frozen=True)
class WrittenRecords:
    """What `write_tfrecords` has written.

    Attributes
    ----------
    path
        The folder.
    files
        Paths or URIs of its files.
    rows, size
        Records and bytes of all files.
    """

    path: str
    files: tuple[str, ...]
    rows: int
    size: int


def write_tfrecords(
    df: Any,
    path: str | os.PathLike[str],
    *,
    compression: Compression = None,
    overwrite: bool = False,
    partitions: int | None = None,
) -> WrittenRecords:
    """Write a Spark DataFrame as TFRecord files of ``tf.train.Example``.

    Spark's tasks write, each partition into a file of its own. The folder is complete or not
    there: files appear in it when all are written, then `_tfdist.json`, which says what they hold,
    and `_SUCCESS`.

    Integers, booleans, dates (as days) and timestamps (as microseconds since 1970) become
    ``int64_list``; floats, doubles and decimals ``float_list``, whose numbers have 32 bits; strings
    and binary ``bytes_list``. An array is a list of several values, an ML vector one of floats. A
    null is a feature that the record lacks.

    Parameters
    ----------
    df
        A ``pyspark.sql.DataFrame``, classic or Connect.
    path
        A folder, new or empty: a path that all machines of the cluster see, or a URI that fsspec
        knows.
    compression
        ``"gzip"``, ``"zlib"`` or None.
    overwrite
        Replace the records that the folder holds. They go when the new ones are complete.
    partitions
        Write so many files; None: as many as the DataFrame has partitions with rows.

    Returns
    -------
    WrittenRecords
        The files, and how many rows they have.

    Raises
    ------
    InputError
        A column that no record can hold, a null in an array, or a folder that cannot be used.
    ClusterError
        Spark could not run the job.
    """
    if not is_spark_frame(df):
        raise InputError(f"`df` must be a Spark DataFrame, not {_kind(df)}")
    uri = _checked_path(path)
    compression = checked_compression(compression)
    if not isinstance(overwrite, bool):
        raise InputError(f"`overwrite` must be True or False, not {overwrite!r}")
    if partitions is not None and not (type(partitions) is int and partitions > 0):
        raise InputError(
            f"`partitions` must be a positive whole number or None, not {partitions!r}"
        )
    from pybackend.launchers import write_records

    manifest = write_records(df, uri, compression, overwrite, partitions)
    files = tuple(folder_at(uri).path(part.name) for part in manifest.parts)
    rows, size = (sum(getattr(p, n) for p in manifest.parts) for n in ("rows", "size"))
    return WrittenRecords(uri, files, rows, size)


def read_tfrecords(
    spark: Any,
    path: str | os.PathLike[str],
    *,
    tfrecord_spec: Mapping[str, str] | None = None,
) -> Any:
    """Read TFRecord files of ``tf.train.Example`` as a Spark DataFrame.

    What `write_tfrecords` has written comes back with the types that it had; doubles and decimals
    with the precision of 32 bits, ML vectors as arrays. Of other files a sample shows what they
    hold: a feature is a scalar where each record of the sample that has it holds one value, else an
    array; numbers are ``bigint`` or ``float``, bytes ``binary``. The rows are read, and their
    checksums compared, when the DataFrame is used.

    Parameters
    ----------
    spark
        A ``SparkSession``, classic or Connect.
    path
        A file, or a folder of files: a path that all machines of the cluster see, or a URI that
        fsspec knows. Compression (gzip or zlib) is recognised.
    tfrecord_spec
        The features to read, by name: ``"int64"``, ``"float32"``, ``"bytes"`` or ``"string"``, with
        ``"[]"`` behind it for an array. None: all features.

    Returns
    -------
    pyspark.sql.DataFrame
        A row per record; null where a record lacks a feature.

    Raises
    ------
    InputError
        No such files, files that are not TFRecords or not those that their manifest names, or a
        wrong ``tfrecord_spec``.
    """
    if not is_session(spark):
        raise InputError(f"`spark` must be a SparkSession, not {_kind(spark)}")
    uri = _checked_path(path)
    if tfrecord_spec is not None:
        check_tfrecord_spec(tfrecord_spec)
    from pybackend.launchers import read_records

    return read_records(spark, uri, tfrecord_spec)


def _checked_path(path: Any) -> str:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise InputError(f"`path` must be a path or a URI, not {path!r}")
    uri = os.fspath(path)
    return uri if is_remote(uri) else local_path(uri)


def _kind(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"
