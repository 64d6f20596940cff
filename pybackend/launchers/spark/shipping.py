"""Send this package to the executors, so that they need only Python and TensorFlow."""

from __future__ import annotations

import hashlib
import io
import tempfile
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from pybackend.launchers.package_files import package_files, read_sources
from pybackend.launchers.spark.session import ask, is_connect

# Fixed, so that the archive depends only on its content: Spark rejects a second file with the same
# name and other bytes.
_STAMP = (1980, 1, 1, 0, 0, 0)


def ship_package(session: Any) -> None:
    """Make ``import pybackend`` on the executors load the driver's version."""
    archive = _pack_package(_digest(read_sources()))
    name = f"pybackend-{hashlib.sha256(archive).hexdigest()[:16]}.zip"
    request = "to take this package's archive"
    if is_connect(session):
        with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
            path = Path(folder) / name
            path.write_bytes(archive)
            ask(
                session, request, lambda: session.addArtifacts(str(path), pyfile=True), len(archive)
            )
        return
    from pyspark import SparkFiles

    # Executors fetch it at any time while the context lives: so it is in the folder that Spark
    # removes with the context.
    shipped = vars(session.sparkContext).setdefault("tfdist_shipped", set())
    if name not in shipped:
        root = ask(session, "its folder for files", SparkFiles.getRootDirectory)
        path = Path(root) / "tfdist" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(archive)
        ask(session, request, lambda: session.sparkContext.addPyFile(str(path)), len(archive))
        shipped.add(name)


def _digest(sources: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sources.items():
        digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()


@lru_cache(maxsize=1)  # equal code may be compiled to different bytes
def _pack_package(digest: str) -> bytes:
    """Return the archive of the sources with this digest."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zipped:
        for name, content in package_files().items():
            zipped.writestr(zipfile.ZipInfo(name, _STAMP), content)
    return archive.getvalue()
