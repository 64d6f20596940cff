"""This package as files for other hosts, and this Python's own shared library."""

from __future__ import annotations

import hashlib
import io
import marshal
import os
import sys
import sysconfig
import threading
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import lru_cache
from importlib.machinery import SourceFileLoader
from importlib.resources import files
from importlib.resources.abc import Traversable
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path
from types import CodeType

import pybackend

_VARIABLE = "LD_LIBRARY_PATH"


def own_libraries() -> dict[str, str]:
    """Return the variable that makes a process load this Python's library; empty if not needed."""
    listed = os.environ.get(_VARIABLE)
    folder = sysconfig.get_config_var("LIBDIR")
    is_needed = (
        listed
        and folder
        and sysconfig.get_config_var("Py_ENABLE_SHARED")
        and listed.split(os.pathsep)[0] != folder
        and folder.startswith(sys.base_prefix)  # else it was moved, with its library
    )
    return {_VARIABLE: f"{folder}{os.pathsep}{listed}"} if is_needed else {}


def load_own_libraries() -> None:
    """Restart this process if it may have loaded another Python's library."""
    if wanted := own_libraries():
        # The same program, with the variable: with the wrong library most of Python works, but some
        # modules, such as `ssl`, cannot be imported.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})  # noqa: S606


# A `.pyc` that Python does not compare with its source.
_UNCHECKED = (1).to_bytes(4, "little")
# Fixed, so that an archive depends only on its content: Spark rejects a second file with the same
# name and other bytes.
_STAMP = (1980, 1, 1, 0, 0, 0)
_IMAGES = "core/data/mnist_subset.npz"
_ROOT = Path(pybackend.__file__).parent


def package_root() -> str:
    return str(_ROOT.parent.resolve())


def run_here(module: str, *words: str) -> list[str]:
    """Return the command that calls ``main`` of a module of this package."""
    # Not `python -m`: with it, files in the current directory would shadow installed modules.
    program = f"import sys; sys.path[0] = {package_root()!r}; "
    program += f"from pybackend.core.{module} import main; main(*sys.argv[1:])"
    return [sys.executable, "-c", program, *words]


def pack_package(is_for_hosts: bool = False) -> bytes:
    """Return a zip archive from which this package can be imported.

    In one process, equal sources give the same archive. Python uses the compiled code of an
    archive; in a folder, it would compile the sources again. Other releases of Python use the
    sources. For hosts, the archive has what TensorFlow does not require there, and the images on
    which a script may train.
    """
    with _PACKING:  # else two threads would pack different bytes
        return _pack(digest_files(read_sources()), is_for_hosts)


_PACKING = threading.Lock()


@lru_cache(maxsize=2)  # equal code may be compiled to different bytes
def _pack(digest: str, is_for_hosts: bool) -> bytes:
    sources = read_sources()
    content = sources | {
        f"{name}c": _compile(name, source)
        for name, source in sources.items()
        if name.endswith(".py")
    }
    if is_for_hosts:
        pickle = filter(_is_source, files("cloudpickle").iterdir())
        content |= {f"cloudpickle/{one.name}": one.read_bytes() for one in pickle}
        content[f"pybackend/{_IMAGES}"] = files("pybackend").joinpath(_IMAGES).read_bytes()
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as packed:
        for name, source in content.items():
            entry = zipfile.ZipInfo(name, _STAMP)
            packed.writestr(entry, source, zipfile.ZIP_DEFLATED, compresslevel=1)
    return archive.getvalue()


def digest_files(files: Mapping[str, bytes]) -> str:
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def read_sources() -> dict[str, bytes]:
    """Return this package's sources by name; on other hosts, from the archive there."""

    def walk(folder: Traversable, path: str) -> Iterator[tuple[str, bytes]]:
        for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
            if entry.is_dir():
                yield from walk(entry, f"{path}{entry.name}/")
            elif _is_source(entry):
                yield f"{path}{entry.name}", entry.read_bytes()

    return dict(walk(files("pybackend"), "pybackend/"))


def _is_source(entry: Traversable) -> bool:
    return entry.name.endswith((".py", ".R"))


def _compile(name: str, source: bytes) -> bytes:
    """Return the ``.pyc`` file of a source file, from Python's cache if possible."""
    loader = SourceFileLoader(name, str(_ROOT.parent / name))
    code: CodeType | None = None
    with suppress(OSError):  # this package may be in an archive itself
        code = loader.get_code(name)
    code = code or compile(source, name, "exec", dont_inherit=True)
    header = MAGIC_NUMBER + _UNCHECKED + source_hash(source)
    return header + marshal.dumps(_relocate(code, f"pybackend.zip/{name}"))


def _relocate(code: CodeType, path: str) -> CodeType:
    """Return code with a path that no machine has: else tracebacks show the file that is there."""
    inner = (_relocate(one, path) if isinstance(one, CodeType) else one for one in code.co_consts)
    return code.replace(co_filename=path, co_consts=tuple(inner))
