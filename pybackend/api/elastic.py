"""What an elastic training needs of a call, before anything is started."""

from __future__ import annotations

import os

from pybackend.api.calls import TrainingCall
from pybackend.errors import InputError
from pybackend.launchers import Launcher


def check_elastic_call(launcher: Launcher, call: TrainingCall) -> None:
    """Refuse what cannot be had with workers that go and come.

    Raises
    ------
    InputError
        Names the argument, and says why.
    """
    if call.min_workers is None and call.max_workers is None:
        return
    if launcher.why_fixed is not None:
        raise InputError(
            f"`min_workers` and `max_workers` need workers that may go and come, but "
            f"{launcher.why_fixed}: train on this machine ('local'), on hosts(...) or on "
            "kubernetes(...), or leave them out and have all start again after a loss, with "
            "`restarts`, and `checkpoint` from where they were"
        )
    reason = None
    if call.strategy is not None:
        reason = f"strategy={call.strategy!r}: its workers take steps on their own, and "
        reason += "one that is lost is done without anyway"
    elif callable(call.data) or callable(call.validation_data):
        reason = "a function `data`: which rows the workers have is known to it alone"
    elif isinstance(call.data, (str, os.PathLike)) and call.shuffle != "global":
        reason = "files of which each worker reads its share: give shuffle='global', with which "
        reason += "every worker has all rows"
    if reason is not None:
        raise InputError(f"`min_workers` does not go with {reason}")
