"""Events of a job as records of Python's logging, by the logger ``tfdist``.

No handler is installed here: a script that wants them calls ``logging.basicConfig``, for example.
"""

from __future__ import annotations

import logging
import socket

from pybackend.job.job import LOGGER
from pybackend.job.messages import EpochEnded, Note, PrintedLine, StepEnded, Waits

_Shown = EpochEnded | StepEnded | Note | Waits | PrintedLine


def logs_steps() -> bool:
    """Whether somebody wants records of steps."""
    return LOGGER.isEnabledFor(logging.DEBUG)


def log_start(text: str) -> None:
    """Log that workers are being started, by this machine."""
    LOGGER.info(text, extra={"rank": None, "host": socket.gethostname()})


def log_event(event: _Shown, text: str) -> None:
    """Log an event: epochs and notes as INFO, steps and what workers print as DEBUG.

    Records have the attributes ``rank``, ``host`` and, of epochs and steps, ``epoch`` and ``logs``.
    """
    level = logging.DEBUG if isinstance(event, StepEnded | PrintedLine) else logging.INFO
    if not LOGGER.isEnabledFor(level):
        return
    extra = {"rank": event.rank, "host": event.host}
    if isinstance(event, EpochEnded | StepEnded):
        extra |= {"epoch": event.epoch, "logs": dict(event.logs)}
    where = f" on {event.host}" if event.host else ""
    LOGGER.log(level, "worker %d%s: %s", event.rank, where, text, extra=extra)
