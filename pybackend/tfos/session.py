"""Spark session of a call, and its default file system."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

from pybackend.core.errors import InputError
from pybackend.core.launchers import is_session


def session_of(sc: Any) -> Any:
    """Return the session of a SparkContext, or a session itself; else raise `InputError`."""
    if is_session(sc):
        return sc
    if not hasattr(sc, "parallelize"):
        raise InputError(f"`sc` must be a SparkContext, not {type(sc).__name__}")
    from pyspark.sql import SparkSession

    return SparkSession(sc)


def default_fs(context: Any) -> str:
    """Return Hadoop's default file system, from Spark's settings or Hadoop's own file."""
    known = context.getConf().get("spark.hadoop.fs.defaultFS")
    folder = os.environ.get("HADOOP_CONF_DIR") or os.environ.get("YARN_CONF_DIR")
    if known is None and folder:
        with suppress(OSError):
            text = Path(folder, "core-site.xml").read_text()
            pattern = r"<name>\s*fs\.default(?:FS|\.name)\s*</name>\s*<value>\s*([^<\s]+)"
            found = re.search(pattern, text)
            known = found[1] if found else None
    known = known or "file://"
    # Without the trailing slash, as absolute paths are appended.
    return (
        known[:-1]
        if known.startswith("file://") and known.endswith("/") and known != "file://"
        else known
    )
