"""Which display shows a job: what a session has asked for, or what its output is."""

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
    """Have a function show the progress of calls that are made in this context."""
    token = _teller.set(tell)
    try:
        yield
    finally:
        _teller.reset(token)


def choose_lines(verbose: int) -> Display:
    """What shows single lines."""
    if verbose == 0:
        return Display()
    tell = _teller.get()
    shows_printed = verbose > 1
    return Lines(shows_printed) if tell is None else Told(tell, shows_printed, False)


def choose_display(job: Job) -> Display:
    """What shows a job from its beginning to its end."""
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
    """Whether what is shown can be changed: on a terminal, or in a notebook."""
    from rich.console import Console

    console = Console()
    if console.is_jupyter:
        # By this rich changes what a cell shows.
        return importlib.util.find_spec("ipywidgets") is not None
    try:
        is_terminal = sys.stdout is not None and sys.stdout.isatty()
    except ValueError:  # it was closed
        return False
    return is_terminal and console.is_terminal and not console.is_dumb_terminal
