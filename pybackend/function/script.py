"""Python script as the function that workers run."""

from __future__ import annotations

import os
import runpy
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pybackend.errors import InputError
from pybackend.job.context import WorkerContext


@dataclass(frozen=True)
class Script:
    """Run a script like ``python script.py ...``; the workers' machines need no copy of it.

    Attributes
    ----------
    path
        Path of the script on the driver.
    content
        Content of the script there.
    """

    path: str
    content: bytes = field(repr=False)

    def __call__(self, context: WorkerContext, *arguments: Any) -> None:
        """Run the script as ``__main__``, with these arguments as text."""
        path = self._find()
        sys.argv = [path, *map(str, arguments)]
        sys.path.insert(0, os.path.dirname(path))
        try:
            runpy.run_path(path, run_name="__main__")
        except SystemExit as end:
            if end.code not in (None, 0):
                how = f"status {end.code}" if isinstance(end.code, int) else f"{end.code}"
                raise SystemExit(f"{os.path.basename(path)} exited with {how}") from None

    def _find(self) -> str:
        """Return the path of the same script on this machine, or of a new copy."""
        try:
            if Path(self.path).read_bytes() == self.content:
                return self.path
        except OSError:
            pass
        copy = Path(tempfile.mkdtemp(), os.path.basename(self.path))  # in the worker's folder
        copy.write_bytes(self.content)
        return str(copy)


def read_script(path: str | os.PathLike[str]) -> Script:
    """Read a script that workers are to run.

    Raises
    ------
    InputError
        It is not a Python file, or cannot be read or parsed.
    """
    shown = os.path.abspath(os.fspath(path))
    if not shown.endswith(".py"):
        raise InputError(
            f"`fn` must be a function or the path of a .py file, not {os.fspath(path)!r}"
        )
    try:
        content = Path(shown).read_bytes()
        compile(content, shown, "exec", dont_inherit=True)
    except OSError as error:
        raise InputError(f"`fn`: the script {shown} cannot be read: {error.strerror}") from error
    except (SyntaxError, ValueError) as error:
        raise InputError(f"`fn`: the script {shown} is not Python: {error}") from error
    return Script(shown, content)
