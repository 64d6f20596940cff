"""Write a Spark DataFrame as TFRecord files of tf.train.Example, and read such files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pybackend.core.data.files import as_uri, open_folder
from pybackend.core.data.tfrecord.framing import Compression, check_compression
from pybackend.core.errors import InputError
from pybackend.core.job.arguments import check_flag
from pybackend.core.job.storage_options import check_tfrecord_spec
from pybackend.core.launchers import is_session, is_spark_frame
from pybackend.core.words import show, term


@dataclass(frozen=True)
class WrittenRecords:
    """Files that `write_tfrecords` wrote.

    Attributes
    ----------
    path
        The folder.
    files
        Paths or URIs of the files.
    rows, size
        Total number of records and of bytes.
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

    Spark's tasks write one file per partition. The folder is either complete or absent: the files
    appear in it once all are written, then `_tfdist.json`, which describes them, and `_SUCCESS`.

    Integers, booleans, dates (as days) and timestamps (as microseconds since 1970) become
    ``int64_list``; floats, doubles and decimals become ``float_list``, which holds 32-bit numbers;
    strings and binary values become ``bytes_list``. An array becomes a list of several values, an
    ML vector a list of floats. A null is stored by leaving the feature out of the record.

    Parameters
    ----------
    df
        A ``pyspark.sql.DataFrame``, classic or Connect.
    path
        A folder, new or empty: a path that all machines of the cluster share, or a URI for fsspec.
    compression
        ``"gzip"``, ``"zlib"`` or None.
    overwrite
        True replaces the records in the folder. The old ones are removed once the new ones are
        complete.
    partitions
        Number of files. None (default): the number of partitions that have rows.

    Returns
    -------
    WrittenRecords
        The files, and their number of rows.

    Raises
    ------
    InputError
        A column cannot be written as records, an array contains a null, or the folder cannot be
        used.
    ClusterError
        Spark could not run the job.
    """
    if not is_spark_frame(df):
        raise InputError(f"`df` must be a {term('Spark DataFrame')}, not {_kind(df)}")
    uri = _checked_path(path)
    compression = check_compression(compression)
    check_flag("overwrite", overwrite)
    # Not isinstance: True is an int.
    if partitions is not None and not (type(partitions) is int and partitions > 0):
        raise InputError(
            f"`partitions` must be a positive whole number or {show(None)}, not {show(partitions)}"
        )
    from pybackend.core.launchers import write_records

    manifest = write_records(df, uri, compression, overwrite, partitions)
    files = tuple(open_folder(uri).path(part.name) for part in manifest.parts)
    rows, size = (sum(getattr(p, n) for p in manifest.parts) for n in ("rows", "size"))
    return WrittenRecords(uri, files, rows, size)


def read_tfrecords(
    spark: Any, path: str | os.PathLike[str], *, tfrecord_spec: Mapping[str, str] | None = None
) -> Any:
    """Read TFRecord files of ``tf.train.Example`` as a Spark DataFrame.

    Files written by `write_tfrecords` are read with their original types; doubles and decimals have
    32-bit precision, and ML vectors become arrays. The types of other files are inferred from a
    sample: a feature is a scalar if each record of the sample that has it holds one value, else an
    array; numbers are ``bigint`` or ``float``, bytes ``binary``. Rows are read, and checksums
    compared, when the DataFrame is used.

    Parameters
    ----------
    spark
        A ``SparkSession``, classic or Connect.
    path
        A file, or a folder of files: a path that all machines of the cluster share, or a URI for
        fsspec. Compression (gzip or zlib) is recognised.
    tfrecord_spec
        Maps the features to read to ``"int64"``, ``"float32"``, ``"bytes"`` or ``"string"``,
        followed by ``"[]"`` for an array. None (default): all features.

    Returns
    -------
    pyspark.sql.DataFrame
        A row per record; null if a feature is absent.

    Raises
    ------
    InputError
        The files do not exist, are not TFRecord files, or do not match their manifest; or
        ``tfrecord_spec`` is invalid.
    """
    if not is_session(spark):
        raise InputError(f"`{term('spark')}` must be a SparkSession, not {_kind(spark)}")
    uri = _checked_path(path)
    if tfrecord_spec is not None:
        check_tfrecord_spec(tfrecord_spec)
    from pybackend.core.launchers import read_records

    return read_records(spark, uri, tfrecord_spec)


def _checked_path(path: Any) -> str:
    if not isinstance(path, (str, os.PathLike)) or not os.fspath(path):
        raise InputError(f"`path` must be a path or a URI, not {show(path)}")
    return as_uri(os.fspath(path))


def _kind(value: Any) -> str:
    return f"a {type(value).__module__}.{type(value).__qualname__}"
