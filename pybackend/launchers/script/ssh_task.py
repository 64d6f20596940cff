"""Agent on a host that is reachable by ssh."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import IO

from pybackend.launchers.processes import adopt_orphans, end_descendants, when_orphaned
from pybackend.launchers.remote.bundle import LIBRARY
from pybackend.launchers.script.agent import serve
from pybackend.machine.processes import list_children

_END_SECONDS = 10.0


def run(folder: str, pipe: IO[bytes], channel: int) -> None:
    """Serve the driver until it disconnects; ranks import the driver's release of this package.

    Parameters
    ----------
    folder
        Folder of the bundle.
    pipe, channel
        Pipe from the driver, and descriptor of the pipe to the driver.
    """
    paths = [str(Path(folder, LIBRARY)), os.environ.get("PYTHONPATH", "")]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    spared = list_children()  # the process that removes the folder
    guard = when_orphaned(signal.SIGTERM)
    agent = os.fork()
    if agent == 0:
        guard()
        # The pipe's buffer is empty: the driver sends no order before the agent is ready.
        serve(os.dup(pipe.fileno()), channel, variables)
        os._exit(0)
    # Two processes: if one of them is killed, the other ends the descendants of the ranks.
    adopt_orphans()
    os.waitpid(agent, 0)
    end_descendants(_END_SECONDS, spared)
