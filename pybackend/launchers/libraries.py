"""Shared library of this Python, in processes where R's library path may contain another one."""

from __future__ import annotations

import os
import sys
import sysconfig

_VARIABLE = "LD_LIBRARY_PATH"


def own_libraries() -> dict[str, str]:
    """Return the variable that makes a process load this Python's library; empty if not needed."""
    listed = os.environ.get(_VARIABLE)
    folder = sysconfig.get_config_var("LIBDIR")
    if not listed or not folder or not sysconfig.get_config_var("Py_ENABLE_SHARED"):
        return {}
    if listed.split(os.pathsep)[0] == folder:
        return {}
    return {_VARIABLE: f"{folder}{os.pathsep}{listed}"}


def load_own_libraries() -> None:
    """Restart this process if it may have loaded another Python's library.

    With such a library most of Python works, but some modules, such as `ssl`, cannot be imported.
    """
    if wanted := own_libraries():
        # The same program, with the variable.
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **wanted})  # noqa: S606
