"""Which Python the tasks of a session run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pybackend.launchers.spark.session import is_connect
from pybackend.launchers.spark.slots import is_one_machine


@contextmanager
def driver_python(session: Any) -> Iterator[None]:
    """On one machine, run the workers with the driver's Python unless another was chosen."""
    is_ours = is_one_machine(session) and not is_connect(session)
    if not is_ours or session.sparkContext.pythonExec != "python3":
        yield
        return
    session.sparkContext.pythonExec = sys.executable
    try:
        yield
    finally:
        session.sparkContext.pythonExec = "python3"
