"""Sends this very package to the executors, so that they need only Python and TensorFlow."""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import pybackend
from pybackend.launchers.spark.session import ask, is_connect

# The archive's content alone decides its bytes: Spark refuses a second file of one name that
# differs from the first.
_STAMP = (1980, 1, 1, 0, 0, 0)


def ship_package(session: Any) -> None:
    """Make ``import pybackend`` give the executors what the driver has."""
    sources = package_sources()
    name = f"pybackend-{_digest(sources)[:16]}.zip"
    request = "to take this package's archive"
    if is_connect(session):
        with tempfile.TemporaryDirectory(prefix="tfdist-") as folder:
            archive = _pack(sources, Path(folder) / name)
            size = archive.stat().st_size
            ask(session, request, lambda: session.addArtifacts(str(archive), pyfile=True), size)
        return
    from pyspark import SparkFiles

    # Executors fetch it at any time while the context lives: it has to stay that long, in the
    # folder that Spark removes with the context.
    shipped = vars(session.sparkContext).setdefault("tfdist_shipped", set())
    if name not in shipped:
        root = ask(session, "its folder for files", SparkFiles.getRootDirectory)
        archive = Path(root) / "tfdist" / name
        archive.parent.mkdir(exist_ok=True)
        _pack(sources, archive)
        size = archive.stat().st_size
        ask(session, request, lambda: session.sparkContext.addPyFile(str(archive)), size)
        shipped.add(name)


def package_sources() -> dict[str, bytes]:
    """This package's files by their names in an archive from which it can be imported."""
    root = Path(pybackend.__file__).parent
    return {
        str(Path("pybackend") / path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.suffix in (".py", ".R")
    }


def _digest(sources: dict[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sources.items():
        digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()


def _pack(sources: dict[str, bytes], archive: Path) -> Path:
    with zipfile.ZipFile(archive, "w") as zipped:
        for name, content in sources.items():
            zipped.writestr(zipfile.ZipInfo(name, _STAMP), content)
    return archive
