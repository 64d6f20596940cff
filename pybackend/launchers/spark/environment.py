"""The environment of a job's workers on Spark: packed once, and sent once per session."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pybackend.job.job import Job
from pybackend.launchers.environment.archive import PackedEnvironment
from pybackend.launchers.environment.packing import pack_for
from pybackend.launchers.spark.environment_task import SparkEnvironment
from pybackend.launchers.spark.python import SHIPPING, shipped_to
from pybackend.launchers.spark.session import ask, is_connect


def ship_environment(
    session: Any, job: Job, say: Callable[[str], object]
) -> SparkEnvironment | None:
    """Send the environment of a job to the executors, once per session; None if it has none."""
    packed = pack_for(job, say)
    if packed is None:
        return None
    with SHIPPING:
        shipped = shipped_to(session)
        if packed.name not in shipped:
            say(f"sending the Python environment to the executors ({packed.name})")
            _send(session, packed)
            shipped.add(packed.name)
    return SparkEnvironment(packed)


def _send(session: Any, packed: PackedEnvironment) -> None:
    request = "to take the Python environment"
    if is_connect(session):
        with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
            path = _place(packed, Path(folder))
            ask(session, request, lambda: session.addArtifacts(path, file=True), packed.size)
        return
    from pyspark import SparkFiles

    # Executors fetch it at any time while the context lives, from the folder that Spark removes
    # with the context.
    root = ask(session, "its folder for files", SparkFiles.getRootDirectory)
    path = _place(packed, Path(root))
    ask(session, request, lambda: session.sparkContext.addFile(path), packed.size)


def _place(packed: PackedEnvironment, folder: Path) -> str:
    """Link or copy the file into a folder, under the name that tells its content."""
    path = folder / packed.name
    path.unlink(missing_ok=True)  # of a call that was interrupted
    try:
        os.link(packed.path, path)
    except OSError:  # on another disk
        shutil.copyfile(packed.path, path)
    return str(path)
