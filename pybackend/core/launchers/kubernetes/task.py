"""Main process of a pod after the driver has sent the bundle: it runs one worker to completion.

This file is imported in the pods.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import IO, NoReturn

import cloudpickle

from pybackend.core.job.messages import Event, Failed, PrintedLine
from pybackend.core.job.notice import Notice
from pybackend.core.launchers.remote.task import (
    TASK,
    RemoteTask,
    describe_failure,
    read_post,
    take_part,
)
from pybackend.core.machine.capacity import count_cores, list_gpus
from pybackend.core.net.meeting_client import MeetingClient
from pybackend.core.net.shared_lines import SharedLines, follow_driver

# Servers between the driver and this pod keep their connection open if the driver's machine
# crashes. A driver that was only stopped may continue within this time.
_SILENT_SECONDS = 600.0


def run(folder: str, pipe: IO[bytes], channel: int) -> NoReturn:
    """Run this pod's worker, report, and wait until the driver has read everything.

    If the pod ended earlier, so would the process that forwards its messages.

    Parameters
    ----------
    folder
        Folder of the bundle. The worker writes only below it.
    pipe, channel
        Pipe from the driver, and descriptor of the pipe to the driver; if ``pipe`` closes, the pod
        ends.
    """
    # The kernel ignores signals to a pod's first process if it has no handler for them.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    lines = SharedLines(pipe, os.fdopen(channel, "wb", buffering=0))
    status = 1

    def end() -> NoReturn:
        """Exit immediately: all processes in the pod end when its first process ends."""
        if status:
            print("tfdist: the driver has ended, or cannot be reached", file=sys.stderr, flush=True)
        os._exit(status)

    rank = int(os.environ["TFDIST_RANK"])
    # No token: Kubernetes has authenticated both ends of the channel.
    meeting = _LoggedMeeting(None, "", rank, 0.0, end, stream=lines.connect(rank))
    reader = follow_driver(lines, end, _SILENT_SECONDS)
    status = 0 if _work(rank, Path(folder), meeting) else 1
    reader.join()
    end()


def _work(rank: int, folder: Path, meeting: MeetingClient) -> bool:
    """Run the worker, and return whether it succeeded; failures are reported to the driver."""
    try:
        # Pickled by the driver, and sent through the channel.
        task: RemoteTask = cloudpickle.loads((folder / TASK).read_bytes())
    except Exception as error:  # such as a missing package
        meeting(Failed(describe_failure(rank, os.uname().nodename, error)))
        return False
    notice, job = Notice(), task.member.job
    if job.can_go_on:
        signal.signal(signal.SIGTERM, notice.take)
    cores = int(os.environ.get("TFDIST_CORES") or count_cores())
    # A pod sees only its own GPUs, so they need not be divided.
    gpus = None if job.resources.gpus is None else list_gpus()
    reached = os.environ.get("TFDIST_ADDRESS")
    return take_part(task, rank, [folder], meeting, cores, gpus, reached, notice, read_post(folder))


class _LoggedMeeting(MeetingClient):
    """Connection to the driver that also writes the worker's output to the pod's log."""

    def __call__(self, event: Event) -> bool:
        if isinstance(event, PrintedLine):
            print(event.text, file=sys.stderr, flush=True)
        return super().__call__(event)
