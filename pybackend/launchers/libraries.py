"""This Python's own shared library, where R lists folders that may hold that of another Python."""

from __future__ import annotations

import os
import sys
import sysconfig

_VARIABLE = "LD_LIBRARY_PATH"


def own_libraries() -> dict[str, str]:
    """The variable with which a process loads this Python's library first; empty if all do."""
    listed = os.environ.get(_VARIABLE)
    folder = sysconfig.get_config_var("LIBDIR")
    if not listed or not folder or not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        return {}
    if listed.split(os.pathsep)[0] == folder:
        return {}
    return {_VARIABLE: f"{folder}{os.pathsep}{listed}"}


def load_own_libraries() -> None:
    """Start this process anew if it may have loaded another Python's library.

    With that most of Python works, but not all of its own modules: `ssl` cannot be imported.
    """
    if wanted := own_libraries():
        # It becomes itself.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})  # noqa: S606
