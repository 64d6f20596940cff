"""Which Python the tasks of a session run."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pybackend.launchers.spark.held import hold
from pybackend.launchers.spark.session import is_connect
from pybackend.launchers.spark.slots import is_one_machine


@contextmanager
def driver_python(session: Any) -> Iterator[None]:
    """On one machine, run the workers with the driver's Python unless another was chosen."""
    if is_connect(session) or not is_one_machine(session):
        yield
        return
    context = session.sparkContext

    def choose() -> str:
        before = str(context.pythonExec)
        if before == "python3":
            context.pythonExec = sys.executable
        return before

    def restore(before: str) -> None:
        context.pythonExec = before

    with hold("python", context, choose, restore):
        yield
