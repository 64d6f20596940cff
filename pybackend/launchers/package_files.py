"""This very package as files, to be sent to hosts that need only Python and TensorFlow."""

from __future__ import annotations

import marshal
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path

import pybackend

# A `.pyc` that Python does not compare with its source.
_UNCHECKED = (1).to_bytes(4, "little")
_ROOT = Path(pybackend.__file__).parent


def package_files() -> dict[str, bytes]:
    """This package's files by their names in an archive from which it can be imported.

    Compiled code goes along, for Python compiles what it finds in an archive anew in every process.
    Another release of Python than this one takes the sources.
    """
    sources = read_sources()
    return sources | {
        f"{name}c": _compile(name, source)
        for name, source in sources.items()
        if name.endswith(".py")
    }


def library_files() -> dict[str, bytes]:
    """The same, and the small packages that it needs beside those that TensorFlow brings."""
    import cloudpickle

    folder = Path(cloudpickle.__file__).parent
    return package_files() | {
        f"{folder.name}/{path.name}": path.read_bytes() for path in sorted(folder.glob("*.py"))
    }


def read_sources() -> dict[str, bytes]:
    """The sources among `package_files`."""
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
