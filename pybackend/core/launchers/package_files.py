"""This package as files for other hosts, and this Python's own shared library."""

from __future__ import annotations

import marshal
import os
import sys
import sysconfig
from importlib.machinery import SourceFileLoader
from importlib.util import MAGIC_NUMBER, source_hash
from pathlib import Path

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
_ROOT = Path(pybackend.__file__).parent


def package_root() -> str:
    return str(_ROOT.parent.resolve())


def run_here(module: str, *words: str) -> list[str]:
    """Return the command that calls ``main`` of a module of this package."""
    # Not `python -m`: with it, files in the current directory would shadow installed modules.
    program = f"import sys; sys.path[0] = {package_root()!r}; "
    program += f"from pybackend.core.{module} import main; main(*sys.argv[1:])"
    return [sys.executable, "-c", program, *words]


def package_files() -> dict[str, bytes]:
    """Return this package's files by name, for an archive from which it can be imported."""
    # Python would compile sources in an archive in every process; other releases of Python use
    # them.
    sources = read_sources()
    return sources | {
        f"{name}c": _compile(name, source)
        for name, source in sources.items()
        if name.endswith(".py")
    }


def library_files() -> dict[str, bytes]:
    """Return `package_files`, and the files of small packages that TensorFlow does not require."""
    import cloudpickle

    folder = Path(cloudpickle.__file__).parent
    return package_files() | {
        f"{folder.name}/{path.name}": path.read_bytes() for path in sorted(folder.glob("*.py"))
    }


def read_sources() -> dict[str, bytes]:
    return {
        str(Path("pybackend") / path.relative_to(_ROOT)): path.read_bytes()
        for path in sorted(_ROOT.rglob("*"))
        if path.suffix in (".py", ".R")
    }


def _compile(name: str, source: bytes) -> bytes:
    """Return the ``.pyc`` file of a source file, from Python's cache if possible."""
    loader = SourceFileLoader(name, str(_ROOT.parent / name))
    header = MAGIC_NUMBER + _UNCHECKED + source_hash(source)
    return header + marshal.dumps(loader.get_code(name))
