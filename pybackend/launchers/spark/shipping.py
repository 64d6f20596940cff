"""Sends this very package to the executors, so that they need only Python and TensorFlow."""

from __future__ import annotations

import hashlib
import io
import marshal
import tempfile
import zipfile
from collections.abc import Mapping
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path
from typing import Any

import pybackend
from pybackend.launchers.spark.session import ask, is_connect

# The archive's content alone decides its bytes: Spark refuses a second file of one name that
# differs from the first.
_STAMP = (1980, 1, 1, 0, 0, 0)
# A `.pyc` that Python does not compare with its source.
_UNCHECKED = (1).to_bytes(4, "little")
_ROOT = Path(pybackend.__file__).parent


def ship_package(session: Any) -> None:
    """Make ``import pybackend`` give the executors what the driver has."""
    archive = _pack_package(_digest(_read_sources()))
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

    # Executors fetch it at any time while the context lives: it has to stay that long, in the
    # folder that Spark removes with the context.
    shipped = vars(session.sparkContext).setdefault("tfdist_shipped", set())
    if name not in shipped:
        root = ask(session, "its folder for files", SparkFiles.getRootDirectory)
        path = Path(root) / "tfdist" / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(archive)
        ask(session, request, lambda: session.sparkContext.addPyFile(str(path)), len(archive))
        shipped.add(name)


def package_files() -> dict[str, bytes]:
    """This package's files by their names in an archive from which it can be imported.

    Compiled code goes along, for Python compiles what it finds in an archive anew in every process.
    Another release of Python than this one takes the sources.
    """
    sources = _read_sources()
    return sources | {
        f"{name}c": _compile(name, source)
        for name, source in sources.items()
        if name.endswith(".py")
    }


def _read_sources() -> dict[str, bytes]:
    return {
        str(Path("pybackend") / path.relative_to(_ROOT)): path.read_bytes()
        for path in sorted(_ROOT.rglob("*"))
        if path.suffix in (".py", ".R")
    }


def _compile(name: str, source: bytes) -> bytes:
    """A ``.pyc`` file of a source file, from Python's own cache if that has it."""
    loader = SourceFileLoader(name, str(_ROOT.parent / name))
    header = MAGIC_NUMBER + _UNCHECKED + source_hash(source)
    return header + marshal.dumps(loader.get_code(name))


def _digest(sources: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sources.items():
        digest.update(name.encode() + b"\0" + content + b"\0")
    return digest.hexdigest()


@lru_cache(maxsize=1)  # equal code need not be compiled to equal bytes
def _pack_package(digest: str) -> bytes:
    """The archive of the sources that have this digest."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as zipped:
        for name, content in package_files().items():
            zipped.writestr(zipfile.ZipInfo(name, _STAMP), content)
    return archive.getvalue()
