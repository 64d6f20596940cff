"""Choose the display of a job, by the request of an R session or by the kind of output."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from pybackend.api.display import Display, Lines, Tell, Told
from pybackend.job.job import Job

_teller: ContextVar[Tell | None] = ContextVar("teller", default=None)


@contextmanager
def told_to(tell: Tell) -> Iterator[None]:
    """Have the function ``tell`` show the progress of all calls in this context."""
    token = _teller.set(tell)
    try:
        yield
    finally:
        _teller.reset(token)


def choose_lines(verbose: int) -> Display:
    """Return a display for single lines."""
    if verbose == 0:
        return Display()
    tell = _teller.get()
    shows_printed = verbose > 1
    return Lines(shows_printed) if tell is None else Told(tell, shows_printed, False)


def choose_display(job: Job) -> Display:
    """Return a display for a job, from its beginning to its end."""
    if job.verbose == 0 or job.kind != "train":
        return choose_lines(job.verbose)
    tell, shows_printed = _teller.get(), job.verbose > 1
    if tell is not None:
        return Told(tell, shows_printed, bool(tell("is_live", {})))
    if _is_live():
        from pybackend.api.live import Live

        return Live(shows_printed)
    return Lines(shows_printed)


def _is_live() -> bool:
    """Return whether the output can change in place: on a terminal, or in a notebook."""
    from rich.console import Console

    console = Console()
    if console.is_jupyter:
        # rich uses it to update the output of a cell.
        return importlib.util.find_spec("ipywidgets") is not None
    try:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
    except ValueError:  # it was closed
        return False
    return is_terminal and console.is_terminal and not console.is_dumb_terminal
