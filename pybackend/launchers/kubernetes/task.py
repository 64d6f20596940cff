"""The main process of a pod, once the driver has sent it everything: one worker, to its end.

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

from pybackend.job.messages import Event, Failed, PrintedLine
from pybackend.job.notice import Notice
from pybackend.launchers.machine_share import count_cores, limit_threads
from pybackend.launchers.remote.driver import follow_driver
from pybackend.launchers.remote.elastic_task import follow_orders, read_post
from pybackend.launchers.remote.task import TASK, RemoteTask, describe_failure, take_part
from pybackend.net.meeting_client import MeetingClient
from pybackend.net.shared_lines import SharedLines

# Between the driver and this pod there are servers that keep their own connection open when the
# driver's machine is gone without a word. A driver that was merely stopped is left alone as long.
_SILENT_SECONDS = 600.0


def run(folder: str, pipe: IO[bytes], channel: int) -> NoReturn:
    """Run this pod's worker, report, and wait until the driver has read it all.

    The pod's end would end the process that passes on what was sent, too.

    Parameters
    ----------
    folder
        That of the bundle. All that the worker writes lies below it.
    pipe, channel
        From and to the driver; with the end of ``pipe`` this process ends at once, and the pod.
    """
    # The system ignores signals to a pod's first process for which there is no handler.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(128 + signal.SIGTERM))
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    lines = SharedLines(pipe, os.fdopen(channel, "wb", buffering=0))
    status = 1

    def end() -> NoReturn:
        """End at once: nothing in the pod outlives its first process."""
        if status:
            print("tfdist: the driver has ended, or is out of reach", file=sys.stderr, flush=True)
        os._exit(status)

    rank = int(os.environ["TFDIST_RANK"])
    # No token: Kubernetes has authenticated both ends of the channel.
    meeting = _LoggedMeeting(None, "", rank, 0.0, end, stream=lines.connect(rank))
    reader = follow_driver(lines, end, _SILENT_SECONDS)
    status = 0 if _work(rank, Path(folder), meeting) else 1
    reader.join()
    end()


def _work(rank: int, folder: Path, meeting: MeetingClient) -> bool:
    """Run the worker; returns whether all went well. If not, the driver was told."""
    try:
        # Made by the driver of its own objects, and brought by the channel.
        task: RemoteTask = cloudpickle.loads((folder / TASK).read_bytes())
    except Exception as error:  # a package that the image lacks
        meeting(Failed(describe_failure(rank, os.uname().nodename, error)))
        return False
    notice, job = Notice(), task.member.job
    if job.can_go_on:
        signal.signal(signal.SIGTERM, notice.take)
    cores = int(os.environ.get("TFDIST_CORES") or count_cores())
    reached = os.environ.get("TFDIST_ADDRESS")
    if job.is_elastic:
        variables = limit_threads(job.resources.cpus or cores)
        post = read_post(folder)
        return follow_orders(task, post, folder, meeting, variables, reached, notice)
    # Kubernetes shows a pod its own GPUs only: nobody has to divide them.
    return take_part(task, rank, folder, meeting, cores, None, reached, notice)


class _LoggedMeeting(MeetingClient):
    """What the worker prints is in the pod's log, too."""

    def __call__(self, event: Event) -> bool:
        """See `MeetingClient`."""
        if isinstance(event, PrintedLine):
            print(event.text, file=sys.stderr, flush=True)
        return super().__call__(event)
