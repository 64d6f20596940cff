"""The agent on a host that ssh has reached."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import IO

from pybackend.launchers.remote.bundle import LIBRARY
from pybackend.launchers.script.agent import serve
from pybackend.launchers.script.descendants import (
    adopt_orphans,
    children,
    end_descendants,
    when_orphaned,
)

_END_SECONDS = 10.0


def run(folder: str, pipe: IO[bytes], channel: int) -> None:
    """Serve the driver until it lets go; its own release of this package is the ranks', too.

    Parameters
    ----------
    folder
        That of the bundle.
    pipe, channel
        From and to the driver.
    """
    paths = [str(Path(folder, LIBRARY)), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    spared = children()  # who removes the folder
    guard = when_orphaned(signal.SIGTERM)
    agent = os.fork()
    if agent == 0:
        guard()
        # Nothing waits in the pipe's buffer: the driver sends no order before the agent is ready.
        serve(os.dup(pipe.fileno()), channel, variables)
        os._exit(0)
    # Two processes: if one of them is killed, the other ends what the ranks have started.
    adopt_orphans()
    os.waitpid(agent, 0)
    end_descendants(_END_SECONDS, spared)
