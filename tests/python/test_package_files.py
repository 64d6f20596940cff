"""A process that R starts with another Python's library folder first."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig


def test_it_starts_anew_with_its_own_library_first() -> None:
    program = (
        "import os; from pybackend.core.launchers.package_files import load_own_libraries as load;"
        "load(); import ssl, sys; print(os.environ['LD_LIBRARY_PATH'], *sys.argv[1:])"
    )
    listed = "/nonexistent/lib"  # no Python's own folder, as /usr/lib/... is of Debian's
    shown = subprocess.run(
        [sys.executable, "-c", program, "a b"],
        env={**os.environ, "LD_LIBRARY_PATH": listed},
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    is_shared = sysconfig.get_config_var("Py_ENABLE_SHARED")
    own = f"{sysconfig.get_config_var('LIBDIR')}:" if is_shared else ""
    assert shown.stdout == f"{own}{listed} a b\n"
